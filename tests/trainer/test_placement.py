"""Placements as far as a CPU can tell: a row's mask in one number a token, and a layer's experts as one parameter."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

from artd_schema.run.spec import OptimizerSpec, RunSpec, TrainerSpec
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer import placement, tree_mask
from artd_workers.trainer.batch.rows import subtree_ends
from artd_workers.trainer.model.experts.routed import Order
from artd_workers.trainer.model.experts.router_replay import ReplayError
from artd_workers.trainer.model.layers import MaskedAttention
from artd_workers.trainer.model.lora import Lora, shapes_of
from artd_workers.trainer.model.model import ALONE, Policy, build
from artd_workers.trainer.model.product import adapted_product
from artd_workers.trainer.parallel import context
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.placement import CPU, CUDA, Placement
from artd_workers.trainer.step.step import Optimizer
from artd_workers.transfer.merge import BaseWeights

from . import moe_rig, rig

pytestmark = pytest.mark.torch
GROUPED = Placement(grouped=True)
BLOCK = tree_mask.BLOCK


def random_tree(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """`until` and the dense mask of a random row in preorder, the mask from each segment's ancestors."""
    rng = random.Random(seed)
    spans, ancestors, start = [], {}, 0
    path: list[int] = []
    while start < size:
        number = len(spans)
        del path[rng.randint(0, len(path)) :]
        end = min(size, start + rng.choice([1, 3, 60, 128, 200]))
        ancestors[number] = {number, *path}
        path.append(number)
        spans.append((number, start, end))
        start = end
    segments = torch.tensor([number for number, first, last in spans for _ in range(first, last)])
    return subtree_ends(spans, ancestors), rig.tree_mask(segments, ancestors)


@pytest.mark.parametrize("seed", range(8))
def test_until_says_what_ancestors_say(seed: int) -> None:
    until, mask = random_tree(seed, 700)
    assert torch.equal(tree_mask.hidden(until), mask)


def edge(end: int) -> tuple[Tensor, Tensor]:
    """A segment of one block, one below it that ends at `end`, and a tree of its own up to six blocks."""
    spans = [(0, 0, BLOCK), (1, BLOCK, end), (2, end, 6 * BLOCK)]
    ancestors = {0: {0}, 1: {0, 1}, 2: {2}}
    segments = torch.tensor([number for number, first, last in spans for _ in range(first, last)])
    return subtree_ends(spans, ancestors), rig.tree_mask(segments, ancestors)


ROWS = {f"random {seed}": partial(random_tree, seed, 6 * BLOCK) for seed in range(8)}
ROWS |= {f"edge {off:+d}": partial(edge, 3 * BLOCK + off) for off in (-1, 0, 1)}


@pytest.mark.parametrize("row", ROWS)
def test_block_mask_covers_the_mask_block_by_block(row: str) -> None:
    """A full block hides nothing, one that is not listed hides everything, and the rest is asked token by token."""
    until, mask = ROWS[row]()
    blocks = tree_mask.block_mask(until)
    cut = mask.view(6, BLOCK, 6, BLOCK).transpose(1, 2)
    for q in range(6):
        full = set(blocks.full_kv_indices[0, 0, q, : int(blocks.full_kv_num_blocks[0, 0, q])].tolist())
        some = set(blocks.kv_indices[0, 0, q, : int(blocks.kv_num_blocks[0, 0, q])].tolist())
        assert not full & some
        assert full == {k for k in range(6) if not cut[q, k].any()}
        assert {k for k in range(6) if k not in full and not cut[q, k].all()} == some
    at = torch.arange(len(until))
    none = torch.tensor(0)
    assert torch.equal(~blocks.mask_mod(none, none, at[:, None], at[None, :]), mask)


def test_block_mask_wants_whole_blocks() -> None:
    with pytest.raises(ValueError, match="not a multiple of 128"):
        tree_mask.block_mask(tree_mask.chain(130))


@pytest.mark.parametrize("size", [2 * BLOCK, 300, 1100])
def test_flex_attention_is_masked_attention(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Eager FlexAttention by the block mask of a padded row, against scaled dot products by the dense mask."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # or it asks for a compiler even here
    until, mask = random_tree(3, size)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, size, 16, generator=g) for heads in (4, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask, enable_gqa=True)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, tree_mask.padding(size))) for x in (q, k, v)]
    found = flex.flex_attention(*padded, block_mask=tree_mask.RowMask().of(until), enable_gqa=True)[:, :, :size]
    assert (found - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("begin", [0, 2 * BLOCK, 4 * BLOCK])
def test_queries_of_a_part_see_what_they_see_in_the_row(monkeypatch: pytest.MonkeyPatch, begin: int) -> None:
    """Where ranks share a row: a part's queries with all keys, by eager FlexAttention against dense rows."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    until, mask = random_tree(3, 6 * BLOCK)
    g, part = torch.Generator().manual_seed(1), slice(begin, begin + 2 * BLOCK)
    q, k, v = (torch.randn(1, heads, 6 * BLOCK, 16, generator=g) for heads in (4, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask, enable_gqa=True)[:, :, part]
    seen = tree_mask.RowMask().of(until, begin, 2 * BLOCK)
    assert (seen.seq_lengths, seen.q_indices.shape[-2:]) == ((2 * BLOCK, 6 * BLOCK), (6, 2))
    found = flex.flex_attention(q[:, :, part], k, v, block_mask=seen, enable_gqa=True)
    assert (found - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize(("size", "cp", "tp", "blocks", "part"), [
    (7, 1, 1, True, 7), (7, 1, 4, True, 8), (7, 2, 1, False, 4), (7, 2, 4, False, 4), (9, 2, 4, False, 8),
    (4608, 2, 1, True, 2304), (4609, 2, 2, True, 2560),
])  # fmt: skip
def test_parts_of_a_row_are_whole_blocks_on_a_gpu(size: int, cp: int, tp: int, blocks: bool, part: int) -> None:
    assert context.tokens_per_rank(Parallel(tp=tp, cp=cp), size, blocks) == part


def test_a_row_mask_is_never_another_rows() -> None:
    masks = tree_mask.RowMask()
    one, two = tree_mask.chain(BLOCK), random_tree(1, BLOCK)[0]
    first = masks.of(one)
    assert masks.of(one.detach()) is first and masks.of(two) is not first
    changed = masks.of(two)
    two[0] = 1
    assert masks.of(two) is not changed


def test_chains_are_told_from_trees() -> None:
    assert tree_mask.is_chain(tree_mask.chain(9)) and not tree_mask.is_chain(rig_row().until)
    assert torch.equal(tree_mask.fill(tree_mask.chain(3), 2), torch.tensor([3, 3, 3, 4, 5]))


def rig_row():
    return moe_rig.ROWS[0]


# ---- experts as one parameter ---------------------------------------------------------------------------------------


def policies(folder: Path) -> tuple[Policy, Policy]:
    """The same model and adapter, with experts one by one and as one parameter."""
    plan, base = plan_for(read_config(folder)), BaseWeights(folder)
    made = []
    for place in (CPU, GROUPED):
        lora = Lora(plan.codec, shapes_of(plan.codec, base), rig.RANK, rig.ALPHA, place.grouped)
        lora.initialise(5)
        for name, slot in lora.state().items():
            if ".lora_B." in name:
                slot.copy_(torch.randn(slot.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05)
        made.append(Policy(plan, build(plan, base, ALONE, place), lora))
    return made[0], made[1]


def trained(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs of a tree with replayed routes, and the adapter's gradients by PEFT name."""
    row, shape = rig.only_row(moe_pieces(), 80), policy.plan.routes
    assert shape is not None and policy.lora is not None
    routes = moe_rig.routes_rig.random_routes(shape, len(row.tokens), seed=3)
    with policy.open_replay(True) as step:
        found = policy.score(
            row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, routes
        ).logprobs
        (found * torch.linspace(-1, 1, len(found))).sum().backward()
        assert step is not None and step.finish() == shape.layers
    return found.detach(), policy.lora.outward({name: p.grad for name, p in policy.lora.list_parameters()})


def moe_pieces() -> list[rig.Piece]:
    g = torch.Generator().manual_seed(2)
    prompt, *answers = (torch.randint(3, 1024, (n,), generator=g) for n in (20, 9, 14, 11))
    return [rig.Piece(prompt), *(rig.Piece(answer, parent=0, trained_from=1) for answer in answers)]


def test_grouped_experts_are_the_same_model(sparse_folder: Path) -> None:
    one, grouped = policies(sparse_folder)
    wanted, found = trained(one), trained(grouped)
    assert (found[0] - wanted[0]).abs().max() <= 1e-5
    assert list(found[1]) == list(wanted[1])
    worst = max(rig.relative(found[1][name], wanted[1][name]) for name in wanted[1] if wanted[1][name].any())
    assert worst <= 1e-5
    assert not any(found[1][name].any() for name in wanted[1] if not wanted[1][name].any())
    experts = [p for name, p in grouped.model.named_parameters() if ".experts." in name and ".adapter." not in name]
    assert len(experts) == 2 * grouped.plan.routes.layers


def test_experts_take_rows_that_a_dispatcher_sorted(toy_folders: dict[str, Path]) -> None:
    """As Megatron's MoELayer calls them where experts lie on several ranks: the same results and gradients."""
    _, grouped = policies(toy_folders["moe"])
    experts, shape = grouped.model.decoder.layers[1].mlp.experts, grouped.plan.routes
    assert shape is not None
    g = torch.Generator().manual_seed(7)
    x = torch.randn(9, grouped.model.config.hidden_size, generator=g).requires_grad_()
    probs = torch.rand(9, shape.topk, generator=g).requires_grad_()
    chosen = torch.rand(9, shape.experts, generator=g).topk(shape.topk).indices
    order = Order.of(chosen, shape.experts)
    counts = torch.bincount(chosen.flatten(), minlength=shape.experts)
    rows, _ = experts(x[order.order // shape.topk], counts, probs.flatten()[order.order])
    inputs = (x, probs, experts.linear_fc1.adapter.a, experts.linear_fc1.adapter.b, experts.linear_fc2.adapter.b)
    found, wanted = rows[order.place].unflatten(0, (9, -1)).sum(1), experts.apply_routed(x, probs, order)
    assert (found - wanted).abs().max() <= 1e-5
    slopes = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, wanted)]
    assert all(rig.relative(a, b) <= 1e-5 for a, b in zip(*slopes, strict=True))


def test_grouped_adapters_are_stored_as_any_other(toy_folders: dict[str, Path]) -> None:
    """Initial values, the optimizer's state and the adapter itself have the names, order and bits of the other layout."""
    one, grouped = policies(toy_folders["moe"])
    assert one.lora is not None and grouped.lora is not None
    assert_same(one.lora.state(), grouped.lora.state())
    optimizers = []
    for policy in (one, grouped):
        optimizer = Optimizer.make(policy.lora, OptimizerSpec(lr=1e-2))
        for index, (_, slot) in enumerate(policy.lora.state().items()):
            slot.fill_(index)
        for _, parameter in policy.lora.list_parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        optimizers.append(optimizer)
    assert_same(one.lora.state(), grouped.lora.state())
    stored = optimizers[0].state()
    assert_same(stored, optimizers[1].state())
    fresh = Optimizer.make(grouped.lora, OptimizerSpec(lr=1e-2))
    fresh.load(stored)
    assert_same(stored, fresh.state())
    grouped.lora.load({name: tensor + 1 for name, tensor in one.lora.state().items()})
    assert_same({name: tensor + 1 for name, tensor in one.lora.state().items()}, grouped.lora.state())
    with pytest.raises(ValueError, match="differ in 1 tensors"):
        grouped.lora.load(dict(list(one.lora.state().items())[1:]))


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_recomputed_layers_are_replayed_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, toy_folders: dict[str, Path]
) -> None:
    """With a frozen base, whose embedding gives no gradient."""
    monkeypatch.setattr(megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    folder = toy_folders["moe"]
    plan, base = plan_for(read_config(folder)), BaseWeights(folder)
    found = []
    for one in (GROUPED, Placement(grouped=True, recompute=2), Placement(grouped=True, selective=True)):
        lora = Lora(plan.codec, shapes_of(plan.codec, base), rig.RANK, rig.ALPHA, True)
        lora.initialise(5)
        policy = Policy(plan, build(plan, base, ALONE, one), lora)
        row = rig.only_row(moe_pieces(), 80)
        routes = moe_rig.routes_rig.random_routes(plan.routes, len(row.tokens), seed=3)
        with policy.open_replay(True) as step:
            policy.score(
                row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, routes
            ).logprobs.sum().backward()
            calls = step.finish()
        found.append((calls, {name: p.grad for name, p in lora.list_parameters()}))
    (plain, wanted), *recomputed = found
    assert [calls for calls, _ in recomputed] == [plain + 2, 2 * plain]
    assert all(torch.equal(wanted[name], grads[name]) for _, grads in recomputed for name in wanted)


def test_placements_say_what_they_are() -> None:
    assert not CPU.cuda and CPU.dtype == torch.float32 and CPU.settings()["use_cpu_initialization"]
    assert CUDA.cuda and CUDA.grouped and CUDA.settings()["bf16"] and not CUDA.settings()["use_cpu_initialization"]
    assert Placement(recompute=3).settings()["recompute_num_layers"] == 3
    assert MaskedAttention.__module__ == "artd_workers.trainer.model.layers"


# ---- adapters -------------------------------------------------------------------------------------------------------


def test_an_adapter_joined_is_the_adapter(toy_folders: dict[str, Path]) -> None:
    """One pair of matrices for a fused linear's parts, as the GPU's linears take it."""
    one, _ = policies(toy_folders["moe"])
    for path in ("self_attention.linear_qkv", "self_attention.linear_proj"):
        linear = one.model.get_submodule(f"decoder.layers.1.{path}")
        x = torch.randn(5, 1, linear.adapter.a[0].shape[1], generator=torch.Generator().manual_seed(6))
        a, b = linear.adapter.join(torch.float32)
        assert (x @ a.t() @ b.t() - linear.adapter(x)).abs().max() <= 1e-6


def test_what_is_made_of_an_adapter_follows_its_parameters(toy_folders: dict[str, Path]) -> None:
    """After a step of a fused optimizer, which writes without counting it, and after a load."""
    _, grouped = policies(toy_folders["moe"])
    lora = grouped.lora
    assert lora is not None
    linears = [m for m in grouped.model.modules() if getattr(m, "adapter", None) is not None]
    optimizer = Optimizer.make(lora, OptimizerSpec(lr=0.1))
    optimizer.torch.param_groups[0]["fused"] = True
    for _, parameter in lora.list_parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [linear.adapter.join(torch.float32) for linear in linears]
    assert all(one is linear.adapter.join(torch.float32) for one, linear in zip(before, linears, strict=True))
    optimizer.step()
    after = [linear.adapter.join(torch.float32) for linear in linears]
    assert not any(
        torch.equal(a, b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True)
    )
    lora.load({name: torch.zeros_like(tensor) for name, tensor in lora.state().items()})
    assert not any(part.any() for linear in linears for part in linear.adapter.join(torch.float32))


def test_an_adapted_product_is_a_linear_and_its_adapter(toy_folders: dict[str, Path]) -> None:
    """Values and all gradients of the one function against autograd over the single steps."""
    one, _ = policies(toy_folders["moe"])
    for path in ("self_attention.linear_qkv", "self_attention.linear_proj"):
        linear = one.model.get_submodule(f"decoder.layers.1.{path}")
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(5, 1, linear.weight.shape[1], generator=generator).requires_grad_()
        slope = torch.randn(5, 1, linear.weight.shape[0], generator=generator)
        inputs = (x, *linear.adapter.a, *linear.adapter.b)
        wanted = x @ linear.weight.t() + linear.adapter(x)
        found = adapted_product(x, linear.weight, linear.adapter)
        assert (found - wanted).abs().max() <= 1e-5
        for a, b in zip(
            torch.autograd.grad(found, inputs, slope), torch.autograd.grad(wanted, inputs, slope), strict=True
        ):
            assert a.dtype == torch.float32 and rig.relative(a, b) <= 1e-5


def test_a_grouped_router_that_strays_is_seen(toy_folders: dict[str, Path]) -> None:
    """Its experts come as ids, not as a map."""
    _, grouped = policies(toy_folders["moe"])
    row, shape = rig.only_row(moe_pieces(), 80), grouped.plan.routes
    assert shape is not None

    def stray(_router: object, _args: object, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        used = out[1].clone()
        used[3, 0] = (used[3, 0] + 1) % shape.experts
        return out[0], used

    routes = moe_rig.routes_rig.random_routes(shape, len(row.tokens), seed=3)
    grouped.model.decoder.layers[1].mlp.router.register_forward_hook(stray)
    with grouped.open_replay(True) as step, torch.no_grad():
        grouped.score(row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, routes)
        with pytest.raises(ReplayError, match="MoE layer 1: the router differs from the given routes in 1 places"):
            step.finish()


def test_what_is_sent_is_copied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory needs a GPU; how it is filled does not."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **rest: empty(*args, **rest))
    whole = torch.arange(5 * 7 * 6).view(5, 7, 6)
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.bool):
        for given in (whole.to(dtype), whole.to(dtype)[1:, :4, ::2], whole.to(dtype)[:0]):
            found = placement._pin(given)
            assert found.dtype == dtype and found.is_contiguous() and torch.equal(found, given)


class Counting(TorchDispatchMode):
    """Counts what is computed or copied inside it; views cost nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_replay_costs_one_conversion_a_row_whatever_the_layers(toy_folders: dict[str, Path]) -> None:
    """Nothing is sent, compared or counted layer by layer: of a layer, a replayed step has the live one's operations at most."""
    _, grouped = policies(toy_folders["moe"])
    row, shape = rig.only_row(moe_pieces(), 80), grouped.plan.routes
    assert shape is not None and shape.layers > 1
    routes, counts = moe_rig.routes_rig.random_routes(shape, len(row.tokens), seed=3).to(torch.uint8), []
    for given in (None, routes):
        with grouped.open_replay(given is not None) as step, Counting() as counting:
            grouped.score(
                row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, given
            ).logprobs.sum().backward()
            if step is not None:
                assert step.finish() == shape.layers
        counts.append(counting.count)
    assert counts[0] > 0 and counts[1] <= counts[0] + 1


def test_routes_that_are_written_to_in_a_step_are_seen(toy_folders: dict[str, Path]) -> None:
    """A router gives its target back, so what it was told cannot be compared with what it used."""
    _, grouped = policies(toy_folders["moe"])
    row, shape = rig.only_row(moe_pieces(), 80), grouped.plan.routes
    assert shape is not None

    def write(_router: object, _args: object, out: tuple[Tensor, Tensor]) -> None:
        out[1][3, 0] = (out[1][3, 0] + 1) % shape.experts

    routes = moe_rig.routes_rig.random_routes(shape, len(row.tokens), seed=3)
    grouped.model.decoder.layers[1].mlp.router.register_forward_hook(write)
    match = "micro-batch 0: its routes were written to"
    with grouped.open_replay(True), torch.no_grad(), pytest.raises(ReplayError, match=match):
        grouped.score(row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, routes)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": "bfloat16"}, "needs a GPU"),
        ({"recompute": "full"}, "needs a GPU"),
        ({"device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(fields: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        placement.of(RunSpec(model="/m", trainer=TrainerSpec(**fields)), 2)


def test_a_spec_places_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.of(RunSpec(model="/m"), 2) is CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = RunSpec(model="/m", trainer=TrainerSpec(dtype="bfloat16"))
    assert placement.of(spec, 2) == CUDA
    again = {"full": {"recompute": 5}, "selective": {"selective": True}}
    for name, fields in again.items():
        found = placement.of(RunSpec(model="/m", trainer=TrainerSpec(device="cuda", recompute=name)), 5)
        assert found == Placement("cuda", torch.float32, True, **fields) and found.again
    assert placement.of(msgspec.structs.replace(spec, parameters="full"), 2) == CUDA
    assert placement.of(RunSpec(model="/m", trainer=TrainerSpec(device="cpu")), 2) is CPU


def test_libraries_are_told_before_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler on a CPU; on a GPU the compiler, and one queue for all launches where weights are split."""
    for name in ("TORCH_COMPILE_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    spec = RunSpec(model="/m")
    placement.prepare(spec)
    assert os.environ.pop("TORCH_COMPILE_DISABLE") == "1" and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    placement.prepare(spec)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ and "TORCH_COMPILE_DISABLE" not in os.environ
    placement.prepare(msgspec.structs.replace(spec, trainer=TrainerSpec(tensor_parallel=2)))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
