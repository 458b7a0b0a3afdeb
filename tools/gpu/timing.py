"""What of the trainer takes how long on a GPU: whole train steps, kernels.

Owner of: no state. Invariants: clocks are read with the device idle.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rows, shape
from .policies import made, memory, on, recompute, settle

PEAK = 790e12
"""bf16 FLOP/s that an 8,192-cubed matrix product reaches on an H200."""
Item = Callable[[bool], Iterator[dict[str, Any]]]


def speed(layers: int, recomputes: list[int]) -> Item:
    """Tokens/s of whole train steps, four rows each. recomputes: layers to recompute, tried in this order until memory ends."""

    def item(tiny: bool) -> Iterator[dict[str, Any]]:
        policy, lora = made(min(layers, 3) if tiny else layers, tiny, on(tiny, recompute=0 if tiny else recomputes[0]))
        each, length, vocab = (32, 512, 512) if tiny else (512, 8192, policy.plan.vocab_size)
        trees = rows.packed(7, 8, each, each, length, vocab)
        optimizer = Optimizer.make(lora, OptimizerSpec(lr=1e-6))
        yield {"what": "loaded", "layers": policy.plan.layers} | memory(tiny)
        trees = rows.with_routes(policy, trees)
        for count in recomputes[:1] if tiny else recomputes:
            recompute(policy, count)
            try:
                yield timed(policy, optimizer, trees, tiny) | {"rows": "groups of 8", "recompute": count}
            except torch.OutOfMemoryError:
                yield {"what": "out of memory", "recompute": count}
                optimizer.torch.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                break
            best = count
        recompute(policy, best)
        chains = rows.with_routes(policy, rows.packed(2, 1, each, length - each, length, vocab))
        yield timed(policy, optimizer, chains, tiny) | {"rows": "one chain each", "recompute": best}

    return item


def timed(policy: Policy, optimizer: Optimizer, batch: Batch, tiny: bool, steps: int = 5) -> dict[str, Any]:
    tokens = sum(len(row.tokens) for row in batch.rows)
    settle(tiny)
    for _ in range(1 if tiny else 2):
        train_step(policy, optimizer, batch, LossSpec(), 0)
    seconds = []
    for _ in range(1 if tiny else steps):
        settle(tiny)
        started = time.perf_counter()
        metrics = train_step(policy, optimizer, batch, LossSpec(), 0)
        settle(tiny)
        seconds.append(time.perf_counter() - started)
    rate = tokens / statistics.median(seconds)
    config = shape.config(policy.plan.layers, tiny)
    flop = shape.flop_per_token(config, batch.trained / tokens, sum(map(rows.pairs, batch.rows)) / tokens)
    return {
        "what": "LoRA train step", "layers": policy.plan.layers, "row_tokens": [len(row.tokens) for row in batch.rows],
        "trained": batch.trained, "seconds": seconds, "tokens_per_s": rate, "mfu": flop * rate / PEAK,
        "loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "calls": metrics["replay_calls"],
    } | memory(tiny)  # fmt: skip


SHARED = {4: (12, 8204, 10_240), 8: (9, 9237, 7680), 16: (6, 10_270, 10_240)}
"""Answers a prompt: how many groups, and row lengths that trees and single sequences fill; three rows of trees each."""


def sharing(tiny: bool) -> Iterator[dict[str, Any]]:
    """The same trajectories of 1,024 + 256 tokens as trees, and each with its own prompt.

    All layers: the head costs a trajectory the same either way, and in a model of few layers it would weigh too much. What a
    step costs whatever its rows is measured by one of a short chain, and taken off in `net_speedup`.
    """
    policy, lora = made(2 if tiny else 48, tiny, on(tiny))
    optimizer, vocab, part = Optimizer.make(lora, OptimizerSpec(lr=1e-6)), policy.plan.vocab_size, 32 if tiny else 1
    yield {"what": "loaded", "layers": policy.plan.layers} | memory(tiny)
    short = rows.packed(2, 1, 16, 16, 32, vocab)
    fixed = statistics.median(timed(policy, optimizer, rows.with_routes(policy, short), tiny)["seconds"])
    for members, (groups, *lengths) in SHARED.items():
        found, took = {"what": "trees against single sequences", "members": members, "fixed_s": fixed}, []
        for name, length in zip(("trees", "single"), lengths, strict=True):
            batch = rows.packed(
                groups, members, 1024 // part, 256 // part, length // part, vocab, shared=name == "trees"
            )
            one = timed(policy, optimizer, rows.with_routes(policy, batch), tiny, 2)
            manifest = batch.manifest
            took.append(statistics.median(one["seconds"]))
            found |= {f"{name}_{key}": one[key] for key in ("row_tokens", "seconds", "tokens_per_s", "mfu")} | {
                f"{name}_fill": manifest.physical_tokens / (manifest.rows * (length // part)),
                f"{name}_trajectories_per_s": groups * members / took[-1],
            }
            if name == "trees":
                found["logical_by_physical"] = manifest.logical_tokens / manifest.physical_tokens
        speedup, net = took[1] / took[0], (took[1] - fixed) / (took[0] - fixed)
        yield found | {
            "speedup": speedup, "share_of_saved": speedup / found["logical_by_physical"], "net_speedup": net,
            "net_share_of_saved": net / found["logical_by_physical"],
        } | memory(tiny)  # fmt: skip


def profile(tiny: bool) -> Iterator[dict[str, Any]]:
    """Where the device's time goes: kernels of one row of 8 layers, forward and backward."""
    policy, lora = made(2 if tiny else 8, tiny, on(tiny))
    each, length, vocab = (32, 512, 512) if tiny else (512, 8192, policy.plan.vocab_size)
    batch = rows.packed(2, 8, each, each, length, vocab)
    batch = rows.with_routes(policy, replace(batch, rows=batch.rows[:1]))
    optimizer = Optimizer.make(lora, OptimizerSpec(lr=1e-6))
    for _ in range(3):
        train_step(policy, optimizer, batch, LossSpec(), 0)
    started = time.perf_counter()
    train_step(policy, optimizer, batch, LossSpec(), 0)
    settle(tiny)
    whole, row = time.perf_counter() - started, batch.rows[0].to(policy.device)
    settle(tiny)
    with policy.open_replay(True):
        started = time.perf_counter()
        policy.score(row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, row.routes)
        launched = time.perf_counter() - started
        settle(tiny)
    done = {"us": whole, "forward_us": time.perf_counter() - started, "forward_launched_us": launched}
    yield {"what": "one step without the profiler"} | {name: round(1e6 * value) for name, value in done.items()}
    yield {
        "what": "waits for the device in a step",
        "where": waits(lambda: train_step(policy, optimizer, batch, LossSpec(), 0)),
    }
    kinds = [torch.profiler.ProfilerActivity.CPU] + ([] if tiny else [torch.profiler.ProfilerActivity.CUDA])
    with torch.profiler.profile(activities=kinds, record_shapes=True) as seen:
        train_step(policy, optimizer, batch, LossSpec(), 0)
        settle(tiny)
    averages = seen.key_averages()
    calls = [(round(e.self_cpu_time_total), e.count, e.key[:60]) for e in averages if e.self_cpu_time_total]
    yield {"what": "CPU microseconds, calls, operation", "operations": sorted(calls, reverse=True)[:50]}
    if not tiny:
        cuda = torch.autograd.DeviceType.CUDA
        kernels = [(round(e.self_device_time_total), e.count, e.key[:100]) for e in averages if e.device_type == cuda]
        busy, count = sum(row[0] for row in kernels), sum(row[1] for row in kernels)
        listed = sorted(kernels, reverse=True)[:60]
        shaped = [
            (round(e.self_device_time_total), e.count, e.key, str(e.input_shapes)[:120])
            for e in seen.key_averages(group_by_input_shape=True) if e.device_type != cuda and e.self_device_time_total
        ]  # fmt: skip
        yield {"what": "device microseconds, calls, operation, shapes", "operations": sorted(shaped, reverse=True)[:60]}
        yield {"what": "device microseconds, calls, kernel", "busy_us": busy, "count": count, "kernels": listed}


def waits(step: Callable[[], object]) -> dict[str, int]:
    """Where torch makes the CPU wait for the device, and how often. Empty without one."""
    if not torch.cuda.is_available():
        return {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(Counter(f"{Path(one.filename).name}:{one.lineno}" for one in seen if "synchron" in str(one.message)))
