"""Long rows on one GPU: what a token costs in memory, whether 131,072 of them train, and what short rows pay for it.

Owner of: no state. Invariants: LoRA on Qwen3-30B-A3B's layers; every batch has replayed routes. Items of `tools.gpu.trainer`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import megatron.core.tensor_parallel.random as megatron_random
import torch
from torch import Tensor

from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.model import logits as head
from artd_workers.trainer.model.experts import chunks
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rows
from .policies import made, memory, on, settle
from .timing import Item, timed

LONGEST = 131_072
KIB_A_TOKEN = 128
"""Goal: by how much the peak of 4 recomputed layers may grow with a token."""
GOAL_GB, GOAL_SPEED = 140.0, 0.98


def lengths(tiny: bool) -> tuple[int, ...]:
    return (128, 512) if tiny else (32_768, 65_536, LONGEST)


def row(policy: Policy, length: int) -> Batch:
    """One chain of `length` tokens, an eighth of it prompt, with the routes of the live routers. It is packed with a partner, which
    is left out: a group of one has no advantage."""
    batch = rows.packed(2, 1, length // 8, length - length // 8, length, policy.plan.vocab_size)
    first = batch.rows[:1]
    counts = torch.bincount(first[0].trajectories, minlength=len(batch.counts))
    return rows.with_routes(policy, replace(batch, rows=first, counts=counts))


def small(tiny: bool) -> AbstractContextManager[object]:
    """For a CPU: pieces and chunks that its rows are longer than, and torch's generator where Megatron wants a GPU's."""
    stack = ExitStack()
    if tiny:
        stack.enter_context(mock.patch.object(chunks, "TOKENS", 100))
        stack.enter_context(mock.patch.object(head, "CHUNK", 100))
        state = "_get_cuda_rng_state", "_set_cuda_rng_state"
        for name, new in zip(state, (lambda *_, **__: torch.get_rng_state(), lambda *_, **__: None), strict=True):
            stack.enter_context(mock.patch.object(megatron_random, name, new))
    return stack


def once(policy: Policy, optimizer: Optimizer, batch: Batch, tiny: bool) -> dict[str, Any]:
    """The second of two steps: seconds, tokens/s, peak; the first compiles."""
    memory(tiny)
    found: dict[str, Any] = {}
    for name in ("first_s", "seconds"):
        settle(tiny)
        started = time.perf_counter()
        metrics = train_step(policy, optimizer, batch, LossSpec(), 0)
        settle(tiny)
        found[name] = time.perf_counter() - started
    tokens = len(batch.rows[0].tokens)
    found |= {"tokens_per_s": tokens / found["seconds"], "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
    return {"row_tokens": tokens, "trained": batch.trained} | found | memory(tiny)


def growth(tiny: bool) -> Iterator[dict[str, Any]]:
    """4 layers, all recomputed: the peak at several lengths, and by how many KiB a token it grows."""
    layers = 2 if tiny else 4
    with small(tiny):
        policy, lora = made(layers, tiny, on(tiny, recompute=layers))
        optimizer = Optimizer.make(lora, OptimizerSpec(lr=1e-6))
        found = []
        for length in lengths(tiny):
            found.append(once(policy, optimizer, row(policy, length), tiny))
            yield {"what": "one long row, 4 layers recomputed", "layers": layers} | found[-1]
    if not tiny:
        first, last = found[0], found[-1]
        bytes_a_token = 1e9 * (last["peak_gb"] - first["peak_gb"]) / (last["row_tokens"] - first["row_tokens"])
        kib = bytes_a_token / 1024
        yield {"what": "growth of the peak", "kib_a_token": kib, "goal": KIB_A_TOKEN, "met": kib <= KIB_A_TOKEN}


def longest(tiny: bool) -> Iterator[dict[str, Any]]:
    """48 layers, all recomputed: one row of 131,072 tokens."""
    layers = 2 if tiny else 48
    with small(tiny):
        policy, lora = made(layers, tiny, on(tiny, recompute=layers))
        optimizer = Optimizer.make(lora, OptimizerSpec(lr=1e-6))
        yield {"what": "loaded", "layers": layers} | memory(tiny)
        found = once(policy, optimizer, row(policy, lengths(tiny)[-1]), tiny)
    goal = {} if tiny else {"goal_gb": GOAL_GB, "met": found["peak_gb"] <= GOAL_GB}
    yield {"what": "one row of 131,072 tokens, 48 layers recomputed", "layers": layers} | found | goal


def short(layers: int) -> Item:
    """Rows of 8,192 tokens without recompute, by the head of before and by this one, in turns."""

    def item(tiny: bool) -> Iterator[dict[str, Any]]:
        policy, lora = made(min(layers, 2) if tiny else layers, tiny, on(tiny))
        each, length, vocab = (32, 512, 512) if tiny else (512, 8192, policy.plan.vocab_size)
        batch = rows.with_routes(policy, rows.packed(2, 1, each, length - each, length, vocab))
        optimizer, rates = Optimizer.make(lora, OptimizerSpec(lr=1e-6)), dict[str, list[float]]()
        for way in ("before", "now", "before", "now"):
            with mock.patch.object(head, "score_targets", before if way == "before" else head.score_targets):
                found = timed(policy, optimizer, batch, tiny, 3)
            rates.setdefault(way, []).append(found["tokens_per_s"])
            yield found | {"what": "rows of 8,192 tokens", "head": way}
        ratio = max(rates["now"]) / max(rates["before"])
        yield {"what": "now by before", "ratio": ratio, "goal": GOAL_SPEED} | (
            {} if tiny else {"met": ratio >= GOAL_SPEED}
        )

    return item


# ---- the head as it was: all logits of a row at once, and their gradient -----------------------------------------------


def before(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, group: None = None) -> Tensor:
    """As `head.score_targets`, for a frozen weight on one rank."""
    assert group is None
    return torch.stack(_Whole.apply(hidden @ weight.t(), targets, temperatures))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy, total = _compiled()[0](logits, targets, temperatures)
        ctx.save_for_backward(logits, targets, temperatures, total)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _compiled()[1](*ctx.saved_tensors, grads[0]), None, None


@lru_cache(1)
def _compiled() -> tuple[Any, Any]:
    both = _forward, _backward
    return both if not torch.cuda.is_available() else (torch.compile(_forward), torch.compile(_backward))


def _forward(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits.float() / temperatures[:, None]
    total = scaled.logsumexp(-1)
    entropy = total - ((scaled - total[:, None]).exp() * scaled).sum(-1)
    return scaled.gather(-1, targets[:, None])[:, 0] - total, entropy, total


def _backward(logits: Tensor, targets: Tensor, temperatures: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    chosen = torch.arange(logits.shape[-1], device=logits.device)[None, :] == targets[:, None]
    share = (logits.float() / temperatures[:, None] - total[:, None]).exp()
    return ((chosen.float() - share) * (gradient / temperatures)[:, None]).to(logits.dtype)
