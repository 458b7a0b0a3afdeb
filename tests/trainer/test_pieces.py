"""Experts in pieces of a row: the same numbers as at once, and none of the tensors that have a row for each choice of each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from artd_schema.run.spec import EngineSpec, RunSpec
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer.model.experts import chunks
from artd_workers.trainer.model.lora import Lora, shapes_of
from artd_workers.trainer.model.model import Policy, build
from artd_workers.trainer.parallel.layout import ALONE
from artd_workers.trainer.parameters.full import FullState
from artd_workers.trainer.placement import Placement
from artd_workers.transfer.merge import BaseWeights

from . import moe_rig, rig
from .test_placement import moe_pieces

pytestmark = pytest.mark.torch
ROW = rig.only_row(moe_pieces(), 80)
Found = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def a_cpus_generator() -> Iterator[None]:
    """Where Megatron wants a GPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
        patch.setattr(megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
        yield


class Wide(TorchDispatchMode):
    """How many tensors have exactly `rows` rows of more than a number or two."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.count = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            self.count += isinstance(one, Tensor) and one.ndim == 2 and len(one) == self.rows and one.shape[1] > 2
        return out


def policy_of(folder: Path, dtype: torch.dtype, trained: str) -> tuple[Policy, Any]:
    plan, base = plan_for(read_config(folder)), BaseWeights(folder)
    place = Placement(dtype=dtype, grouped=True, recompute=plan.layers)
    if trained == "full":
        policy = Policy(plan, build(plan, base, ALONE, place), None)
        spec = RunSpec(model=str(folder), parameters="full", engine=EngineSpec(dtype="bfloat16"))
        state = FullState(policy, base, spec)
        state.initialise(0)
        return policy, state
    lora = Lora(plan.codec, shapes_of(plan.codec, base), rig.RANK, rig.ALPHA, True)
    lora.initialise(5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lora.list_parameters():
            if name.endswith("lora_B") or ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return Policy(plan, build(plan, base, ALONE, place), lora), lora


def step(policy: Policy, trained: Any) -> tuple[Found, int]:
    """Logprobs and gradients of a row; and how many tensors had a row for each choice of each token."""
    shape = policy.plan.routes
    assert shape is not None
    routes = moe_rig.routes_rig.random_routes(shape, len(ROW.tokens), seed=3)
    with policy.open_replay(True) as replay, Wide(len(ROW.tokens) * shape.topk) as wide:
        found = policy.score(
            ROW.tokens, ROW.positions, ROW.until, ROW.at, ROW.targets, ROW.temperatures, routes
        ).logprobs
        (found * torch.linspace(-1, 1, len(found))).sum().backward()
        assert replay is not None and replay.finish() == 2 * shape.layers
    grads = {name: parameter.grad for name, parameter in trained.list_parameters()}
    for _, parameter in trained.list_parameters():
        parameter.grad = None
    return (found.detach(), grads), wide.count


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_pieces_are_the_whole(toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, trained: str) -> None:
    policy, own = policy_of(toy_folders["moe"], torch.float32, trained)
    (wanted, gradients), wide = step(policy, own)
    assert wide > 20
    monkeypatch.setattr(chunks, "TOKENS", 10)
    assert len(ROW.tokens) % 10, "the last piece is shorter"
    (found, grads), wide = step(policy, own)
    assert wide == 0, "a tensor of all choices"
    assert (found - wanted).abs().max() <= 1e-5
    assert grads.keys() == gradients.keys() and any("expert" in name or "fc1" in name for name in grads)
    for name, grad in grads.items():
        assert rig.relative(grad, gradients[name]) <= 1e-5, name


def test_a_rounded_weights_gradient_is_added_up_in_fp32(
    toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many pieces are no farther from fp32 than one."""
    gradients = {}
    for dtype, tokens in ((torch.float32, 10_000), (torch.bfloat16, 10_000), (torch.bfloat16, 2)):
        monkeypatch.setattr(chunks, "TOKENS", tokens)
        policy, own = policy_of(toy_folders["moe"], dtype, "full")
        (_, gradients[dtype, tokens]), _ = step(policy, own)
    exact, whole, parts = gradients.values()
    for name in (name for name in exact if ".experts." in name):
        away = [float((found[name].float() - exact[name]).norm() / exact[name].norm()) for found in (whole, parts)]
        assert away[1] <= 1.006 * away[0], (name, away)
