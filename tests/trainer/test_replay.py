"""Expert replay in Megatron-Core: exact, under recompute and with several micro-batches in flight, and gone after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor, nn

from artd_schema.data.trajectory import RouteShape
from artd_workers.trainer.model.experts.router_replay import ALLOWED, Replay, ReplayError
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.parallel.context import routes_of_rank

from . import moe_rig, routes_rig
from .moe_rig import FOREIGN, ROWS, SHAPE, Gradients, gradients, ids, loss, trained

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def policy() -> Policy:
    return moe_rig.policy()


def same(a: Gradients, b: Gradients) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def routers(policy: Policy) -> list[nn.Module]:
    return [module for module in policy.model.modules() if getattr(module, "router_replay", None) is not None]


@contextmanager
def spied(policy: Policy) -> Iterator[list[tuple[int, Tensor, Tensor, Tensor]]]:
    """(layer, logits [T, experts] of the live router, probabilities, routing map) of each router call."""
    seen: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def hook(layer: int) -> Callable[..., None]:
        def after(router: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, Tensor]) -> None:
            logits = (args[0] @ router.weight.t()).flatten(0, 1)
            seen.append((layer, logits.detach(), out[0].detach(), out[1]))

        return after

    handles = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers(policy))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def recorded(policy: Policy, row: int) -> tuple[Tensor, Tensor, Gradients]:
    """(routes [layers, T, topk], loss, gradients) of the live router, by Megatron's own recording."""
    found = [router.router_replay for router in routers(policy)]
    for replay in found:
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    value = loss(policy, row, None)
    routes = torch.stack([replay.get_recorded_indices() for replay in found])
    value.backward()
    for replay in found:
        replay.clear_router_replay_action()
        replay.clear_indices()
    return routes, value.detach(), gradients(policy)


# ---- exact ----------------------------------------------------------------------------------------------------------


def test_recording_and_its_replay_are_bit_equal_to_plain(policy: Policy) -> None:
    plain = loss(policy, 0, None)
    plain.backward()
    wanted = gradients(policy)
    routes, value, found = recorded(policy, 0)
    assert torch.equal(value, plain) and same(found, wanted) and len(wanted) > 20
    value, found = trained(policy, 0, routes)
    assert torch.equal(value, plain) and same(found, wanted)
    with torch.no_grad():
        assert torch.equal(loss(policy, 0, routes), plain)
    wrong = routes.roll(1, 1)
    assert not torch.equal(trained(policy, 0, wrong)[0], plain)


def test_foreign_routes_are_used_exactly_and_weighted_by_the_live_router(policy: Policy) -> None:
    with spied(policy) as seen:
        trained(policy, 0, FOREIGN[0])
    assert [layer for layer, *_ in seen] == list(range(SHAPE.layers))
    for layer, logits, probabilities, used in seen:
        target = FOREIGN[0][layer].long()
        assert torch.equal(used, torch.zeros_like(used).scatter(1, target, True))
        wanted = torch.zeros_like(logits).scatter(1, target, logits.gather(1, target).softmax(-1))
        assert (probabilities - wanted).abs().max() < 1e-6


def test_gradients_through_router_weights_are_finite_differences() -> None:
    """In float64 but for the router's own float32; along the gradient itself, where rounding weighs least."""
    policy, row = moe_rig.policy(), ROWS[0]
    policy.model.double()

    def exact() -> Tensor:
        logits = policy.hidden_logits(row.tokens, row.positions, row.hidden_from, row.at, FOREIGN[0])
        return -logits.log_softmax(-1).gather(-1, row.targets[:, None]).sum()

    with policy.open_replay(True) as step:
        exact().backward()
        assert step.finish() == SHAPE.layers
    for router in routers(policy):
        size = router.weight.grad.norm()
        direction, values = router.weight.grad / size, []
        with torch.no_grad():
            for length in (1e-2, -1e-2):
                router.weight.add_(length * direction)
                values.append(exact())
                router.weight.sub_(length * direction)
        assert values[0].dtype == torch.float64 and size > 0.1
        assert float(values[0] - values[1]) / 2e-2 == pytest.approx(float(size), rel=1e-3)


def test_a_sequence_is_scored_through_given_routes(policy: Policy) -> None:
    tokens = ids(12)
    live = policy.score_sequence(tokens)
    routes = routes_rig.random_routes(SHAPE, 12, seed=8)
    assert not torch.equal(policy.score_sequence(tokens, routes=routes), live)
    assert torch.equal(policy.score_sequence(tokens), live)


# ---- recompute, and several micro-batches in flight -----------------------------------------------------------------

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "pairs": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
CALLS = {"none": 4, "full": 8, "pairs": 8, "block": 5, "selective": 8}


@pytest.fixture(scope="module")
def policies() -> Iterator[dict[str, Policy]]:
    """A training-mode policy for each kind of recompute, with torch's CPU generator where Megatron wants CUDA's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
        patch.setattr(megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
        made = {kind: moe_rig.policy(**options) for kind, options in RECOMPUTE.items()}
        for policy in made.values():
            policy.model.train()
        yield made


@pytest.fixture(scope="module")
def single(policies: dict[str, Policy]) -> list[tuple[Tensor, Gradients]]:
    """Loss and gradients of each row alone, without recompute."""
    return [trained(policies["none"], row, FOREIGN[row]) for row in (0, 1)]


def test_routes_matter_for_every_gradient(policy: Policy, single: list[tuple[Tensor, Gradients]]) -> None:
    """If they did not, the comparisons below would prove nothing."""
    _, live = trained(policy, 0, None)
    assert all(not torch.equal(live[name], found) for name, found in single[0][1].items())


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recompute_changes_nothing(
    policies: dict[str, Policy], single: list[tuple[Tensor, Gradients]], kind: str
) -> None:
    policy = policies[kind]
    with policy.open_replay(True) as step, spied(policy) as seen:
        value = loss(policy, 0, FOREIGN[0])
        value.backward()
        assert step.finish() == CALLS[kind] == len(seen)
    assert torch.equal(value, single[0][0]) and same(gradients(policy), single[0][1])


@pytest.mark.parametrize("order", ["01", "10", "together", "between"])
@pytest.mark.parametrize("kind", RECOMPUTE)
def test_two_micro_batches_in_flight(
    policies: dict[str, Policy], single: list[tuple[Tensor, Gradients]], kind: str, order: str
) -> None:
    """F0 F1 B0 B1; F0 F1 B1 B0; one backward of both; F0 F1 B0 F2 B1 B2 (pipelined, F2 is row 0 again)."""
    policy = policies[kind]
    rows = [0, 1, 0] if order == "between" else [0, 1]
    with policy.open_replay(True) as step:
        values = [loss(policy, row, FOREIGN[row]) for row in (0, 1)]
        if order == "together":
            (values[0] + values[1]).backward()
        elif order == "between":
            values[0].backward()
            values.append(loss(policy, 0, FOREIGN[0]))
            values[1].backward()
            values[2].backward()
        else:
            for number in order:
                values[int(number)].backward()
        assert step.finish() == len(rows) * CALLS[kind]
    assert all(torch.equal(value, single[row][0]) for value, row in zip(values, rows, strict=True))
    found = gradients(policy)
    for name, gradient in found.items():
        wanted = sum(single[row][1][name] for row in rows)
        assert (gradient - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_a_live_forward_inside_a_step_is_live(policies: dict[str, Policy]) -> None:
    policy = policies["full"]
    plain = loss(policy, 1, None)
    plain.backward()
    wanted = gradients(policy)
    with policy.open_replay(True) as step:
        value = loss(policy, 0, FOREIGN[0])
        live = loss(policy, 1, None)
        value.backward()
        gradients(policy)
        live.backward()
        assert step.finish() == CALLS["full"]
    assert torch.equal(live, plain) and same(gradients(policy), wanted)


# ---- refused --------------------------------------------------------------------------------------------------------

FORBIDDEN = {
    "moe_enable_routing_replay": False,
    "moe_router_fusion": True,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 1.0,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_expert_capacity_factor": 1.0,
    "cuda_graph_impl": "local",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_options_that_would_bypass_replay_are_refused(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(policy.model.config, name, FORBIDDEN[name])
    with pytest.raises(ReplayError, match=name):
        Replay(policy.model, SHAPE)


def test_every_option_has_its_test() -> None:
    assert FORBIDDEN.keys() == ALLOWED.keys()


def test_another_models_routes_are_refused(policy: Policy) -> None:
    for layers, topk, experts in ((3, 2, 8), (4, 1, 8), (4, 2, 16)):
        with pytest.raises(ReplayError, match="belong to another model"):
            Replay(policy.model, RouteShape(layers=layers, topk=topk, experts=experts))


def test_a_model_without_replay_instances_is_refused(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    for router in routers(policy):
        monkeypatch.setattr(router, "router_replay", None)
    with pytest.raises(ReplayError, match="layers=0"):
        Replay(policy.model, SHAPE)


def test_routes_of_the_wrong_size_are_refused(policy: Policy) -> None:
    for wrong in (FOREIGN[0][:, :-1], FOREIGN[0][:2], FOREIGN[0][..., :1]):
        with pytest.raises(ReplayError), torch.no_grad():
            loss(policy, 0, wrong)
    with torch.no_grad():
        loss(policy, 0, None)


def test_gradients_need_a_step(policy: Policy) -> None:
    with pytest.raises(RuntimeError, match="open a step"):
        loss(policy, 0, FOREIGN[0])


def test_steps_do_not_nest(policy: Policy) -> None:
    with (
        policy.open_replay(True),
        pytest.raises(RuntimeError, match="open already"),
        policy.open_replay(True),
    ):
        pass


# ---- what `finish` sees ---------------------------------------------------------------------------------------------


def test_a_router_call_outside_any_micro_batch_is_refused(policy: Policy) -> None:
    """Such as a recompute that no backward of a micro-batch has announced."""
    layer = policy.model.decoder.layers[1].mlp
    with policy.open_replay(True), torch.no_grad():
        loss(policy, 0, FOREIGN[0])
        with pytest.raises(ReplayError, match="MoE layer 1 was called outside any micro-batch"):
            layer(torch.zeros(4, 1, moe_rig.CONFIG["hidden_size"]))


@pytest.mark.parametrize("moment", ["after the step", "after finish"])
def test_a_backward_that_comes_too_late_is_refused(policies: dict[str, Policy], moment: str) -> None:
    """Its recompute would route live."""
    policy = policies["full"]
    with policy.open_replay(True) as step:
        value = loss(policy, 0, FOREIGN[0])
        if moment == "after finish":
            step.finish()
            with pytest.raises(ReplayError, match="came after its step"):
                value.backward()
    if moment == "after the step":
        with pytest.raises(ReplayError, match="came after its step"):
            value.backward()
    policy.model.zero_grad(set_to_none=True)


def test_missing_calls_are_seen(policies: dict[str, Policy]) -> None:
    policy = policies["full"]
    with policy.open_replay(True) as step:
        step.recomputed = (2,) * SHAPE.layers
        loss(policy, 0, FOREIGN[0]).backward()
        with pytest.raises(ReplayError, match=r"micro-batch 0, MoE layer 0: .* 1 forwards and 1 recomputed ones"):
            step.finish()
    policy.model.zero_grad(set_to_none=True)


def test_a_surplus_call_gets_no_routes(policies: dict[str, Policy]) -> None:
    """They are gone by then."""
    policy = policies["full"]
    with policy.open_replay(True) as step:
        step.recomputed = (0, 1, 1, 1)
        value = loss(policy, 0, FOREIGN[0])
        with pytest.raises(ReplayError, match="micro-batch 0, MoE layer 0: routes were needed once more"):
            value.backward()
    policy.model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_routes_leave_the_device_with_their_row(policies: dict[str, Policy], kind: str) -> None:
    """Whatever else is in flight; and nothing that was used is kept to be compared at the step's end."""
    policy = policies[kind]
    with policy.open_replay(True) as step:
        values = [loss(policy, row, FOREIGN[row]) for row in (0, 1)]
        for number in (1, 0):
            held = [micro.staged is not None for micro in step._micros]
            assert held == [False if kind == "none" else row <= number for row in (0, 1)]
            values[number].backward()
            assert step._micros[number].staged is None and not step._used
        with torch.no_grad():
            loss(policy, 2, FOREIGN[2])
        assert step._micros[2].staged is None
        step.finish()
    policy.model.zero_grad(set_to_none=True)


def test_recomputed_layers_keep_routes_in_a_byte(policies: dict[str, Policy]) -> None:
    policy = policies["full"]
    with policy.open_replay(True) as step:
        value = loss(policy, 0, FOREIGN[0])
        staged = step._micros[0].staged
        assert staged is not None and staged.dtype == torch.uint8
        del staged
        value.backward()
        step.finish()
    policy.model.zero_grad(set_to_none=True)


def test_a_router_that_strays_from_its_target_is_seen(policy: Policy) -> None:
    def stray(router: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        used = out[1].clone()
        used[3] = used[3].roll(1)
        return out[0], used

    handle = routers(policy)[1].register_forward_hook(stray)
    with policy.open_replay(True) as step, torch.no_grad():
        loss(policy, 1, FOREIGN[1])
        with pytest.raises(ReplayError, match="micro-batch 0, MoE layer 1: the router differs"):
            step.finish()
    handle.remove()


# ---- nothing stays --------------------------------------------------------------------------------------------------


def untouched(policy: Policy) -> bool:
    return all(
        r.router_replay.target_topk_idx is None
        and r.router_replay.router_replay_action is None
        and r.router_replay.replay_backward_list == []
        and not r._forward_hooks
        and not r._forward_pre_hooks
        for r in routers(policy)
    )


def test_nothing_stays_after_a_step(policy: Policy) -> None:
    with torch.no_grad():
        before = loss(policy, 0, None)
        trained_loss = loss(policy, 0, FOREIGN[0])
        assert untouched(policy) and not torch.equal(before, trained_loss)
        assert torch.equal(loss(policy, 0, None), before)


@pytest.mark.parametrize("place", ["router", "expert", "between", "backward"])
def test_nothing_stays_after_an_exception(policies: dict[str, Policy], place: str) -> None:
    policy = policies["full"]
    with torch.no_grad():
        before = loss(policy, 0, None)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"), policy.open_replay(True):
        if place == "router":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(routers(policy)[1], "routing", fail)
                loss(policy, 0, FOREIGN[0])
        if place == "expert":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(policy.model.decoder.layers[1].mlp, "dispatch", fail)
                loss(policy, 0, FOREIGN[0])
        value = loss(policy, 0, FOREIGN[0])
        if place == "backward":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(routers(policy)[1], "routing", fail)
                value.backward()
        assert place == "between", "nothing was raised"
        fail()
    policy.model.zero_grad(set_to_none=True)
    assert untouched(policy)
    with torch.no_grad():
        assert torch.equal(loss(policy, 0, None), before)


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_chunks_are_contiguous_and_padded() -> None:
    routes = routes_rig.random_routes(SHAPE, 7).to(torch.uint8)
    parts = [routes_of_rank(routes, rank, 2) for rank in range(4)]
    assert all(part.shape == (SHAPE.layers, 2, SHAPE.topk) and part.dtype == torch.uint8 for part in parts)
    joined = torch.cat(parts, 1)
    assert torch.equal(joined[:, :7], routes) and joined[:, 7].tolist() == [[0, 1]] * SHAPE.layers
    beyond = routes_of_rank(routes[:, :1], 3, 1)
    assert beyond.tolist() == [[[0, 1]]] * SHAPE.layers
