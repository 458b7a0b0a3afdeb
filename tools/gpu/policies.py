"""Policies for the GPU scripts, and what is asked of one: logprobs, gradients, recompute, memory.

Owner of: no state. Invariants: seeded; `tiny` stands for a CPU and a small shape everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from artd_workers.models.registry import plan_for
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.model.lora import Lora, shapes_of
from artd_workers.trainer.model.model import ALONE, Policy, build
from artd_workers.trainer.placement import CUDA, Placement

from . import shape


def made(layers: int, tiny: bool, placement: Placement, rank: int = 16) -> tuple[Policy, Lora]:
    """The model with an adapter that does something: its B is random too."""
    config = shape.config(layers, tiny)
    plan = plan_for(config)
    weights = shape.RandomWeights(plan, config, placement.device)
    lora = Lora(plan.codec, shapes_of(plan.codec, weights), rank, 2 * rank, placement.grouped)
    lora.initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in lora.list_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02, generator=generator)
    return Policy(plan, build(plan, weights, ALONE, placement), lora), lora


def made_like(adapter: dict[str, Tensor], placement: Placement) -> Policy:
    """The CPU's toy elsewhere: the same numbers, drawn on the CPU."""
    config = shape.config(2, True)
    plan = plan_for(config)
    weights = shape.RandomWeights(plan, config, "cpu")
    lora = Lora(plan.codec, shapes_of(plan.codec, weights), 8, 16, placement.grouped)
    lora.load(adapter)
    return Policy(plan, build(plan, weights, ALONE, placement), lora)


def on(tiny: bool, **change: Any) -> Placement:
    return replace(Placement(grouped=True) if tiny else CUDA, **change)


def scored(policy: Policy, batch: Batch, seen: Callable[[Any], Tensor], replayed: bool = True) -> Tensor:
    """Logprobs of all trained tokens, fp64 on the CPU. seen: the mask that a row is given with."""
    with torch.no_grad():
        return torch.cat([
            policy.score(r.tokens, r.positions, seen(r), r.at, r.targets, r.temperatures, r.routes if replayed else None)
            .logprobs.double().cpu() for r in batch.rows
        ])  # fmt: skip


def gradient(policy: Policy, batch: Batch) -> Tensor:
    """The adapter's gradient of the sum of trained logprobs, fp64, in the order on disk."""
    with policy.open_replay(True) as replay:
        for r in batch.rows:
            policy.score(
                r.tokens, r.positions, r.until, r.at, r.targets, r.temperatures, r.routes
            ).logprobs.sum().backward()
        replay.finish()
    found = policy.lora.outward({name: parameter.grad for name, parameter in policy.lora.list_parameters()})
    for parameter in policy.lora.parameters():
        parameter.grad = None
    return torch.cat([tensor.double().cpu().flatten() for tensor in found.values()])


def errors(found: Tensor, wanted: Tensor) -> dict[str, float]:
    difference = (found - wanted).abs()
    return {
        "mean": float(difference.mean()),
        "rms": float(difference.square().mean().sqrt()),
        "max": float(difference.max()),
    }


def until(row: Any) -> Tensor:
    return row.until


def dense(row: Any) -> Tensor:
    return row.hidden_from


def recompute(policy: Policy, count: int) -> None:
    """Let the first `count` layers run again in the backward."""
    config = policy.model.config
    config.recompute_granularity = "full" if count else None
    config.recompute_method, config.recompute_num_layers = ("block", count) if count else (None, None)


def settle(tiny: bool) -> None:
    if not tiny:
        torch.cuda.synchronize()


def memory(tiny: bool) -> dict[str, float]:
    """Peak bytes allocated since the last call, in GB."""
    if tiny:
        return {}
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return {"peak_gb": peak}
