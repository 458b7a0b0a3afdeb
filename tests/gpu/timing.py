"""What of the trainer takes how long on a GPU: whole train steps, replay's own cost, kernels.

Owner of: no state. Invariants: clocks are read with the device idle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from artd_schema.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.model import Policy
from artd_workers.trainer.packed import Batch
from artd_workers.trainer.step import Optimizer, train_step

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


def timed(policy: Policy, optimizer: Optimizer, batch: Batch, tiny: bool, steps: int = 3) -> dict[str, Any]:
    tokens = sum(len(row.tokens) for row in batch.rows)
    settle(tiny)
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


def replay_cost(tiny: bool) -> Iterator[dict[str, Any]]:
    """The same rows with the same routes, live and replayed, in turns."""
    policy, lora = made(2 if tiny else 8, tiny, on(tiny))
    each, length, vocab = (32, 512, 512) if tiny else (512, 8192, policy.plan.vocab_size)
    live = rows.packed(2, 8, each, each, length, vocab)
    live = replace(live, rows=live.rows[:1])
    replayed = rows.with_routes(policy, live)
    optimizer = Optimizer.make(lora, OptimizerSpec(lr=1e-12))
    rounds = 3 if tiny else 200
    took: dict[str, list[float]] = {"live": [], "replayed": []}
    for number in range(-3, rounds):
        order = (("live", live), ("replayed", replayed))
        for name, batch in order if number % 2 else reversed(order):
            settle(tiny)
            started = time.perf_counter()
            train_step(policy, optimizer, batch, LossSpec(), 0)
            settle(tiny)
            if number >= 0:
                took[name].append(time.perf_counter() - started)
    differences = [100 * (b / a - 1) for a, b in zip(took["live"], took["replayed"], strict=True)]
    mean, half = statistics.mean(differences), 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    yield {
        "what": "cost of replay, paired", "layers": policy.plan.layers, "rounds": rounds, "percent": mean,
        "interval": [mean - half, mean + half], "median_percent": statistics.median(differences),
        "live_s": statistics.median(took["live"]), "replayed_s": statistics.median(took["replayed"]),
    }  # fmt: skip


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
    with policy.replaying(True):
        started = time.perf_counter()
        policy.score(row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, row.routes)
        launched = time.perf_counter() - started
        settle(tiny)
    done = {"us": whole, "forward_us": time.perf_counter() - started, "forward_launched_us": launched}
    yield {"what": "one step without the profiler"} | {name: round(1e6 * value) for name, value in done.items()}
    kinds = [torch.profiler.ProfilerActivity.CPU] + ([] if tiny else [torch.profiler.ProfilerActivity.CUDA])
    with torch.profiler.profile(activities=kinds) as seen:
        train_step(policy, optimizer, batch, LossSpec(), 0)
        settle(tiny)
    wanted = torch.autograd.DeviceType.CPU if tiny else torch.autograd.DeviceType.CUDA
    table = [
        (round(e.self_cpu_time_total if tiny else e.self_device_time_total), e.count, e.key[:100])
        for e in seen.key_averages() if e.device_type == wanted
    ]  # fmt: skip
    busy = sum(microseconds for microseconds, _, _ in table)
    kernels = sorted(table, reverse=True)[:60]
    yield {"what": "device microseconds, calls, kernel", "busy_us": busy, "kernels": kernels}
