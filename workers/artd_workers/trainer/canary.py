"""The canary of a checkpoint: fixed prompts and what the trainer thinks of them.

Purpose: an engine that claims to serve a checkpoint must give the same logprobs. Owner of: no state.
Invariants: prompts depend on the vocabulary and the special ids alone, so that all checkpoints of a run share them.
"""

from __future__ import annotations

import torch

from artd_schema.manifest import Canary

from ..models.base import Plan
from .model import Policy

PROMPTS, TOKENS = 4, 32
_SEED = 20_640
FP32_TOY, FP32, BF16_MEAN, BF16_MAX = 1e-5, 2e-4, 0.05, 2.0
"""Bounds in nats: fp32 models of at most `TOY_LAYERS` layers, other fp32 ones, the mean of bf16 engines; a single token may
stray much further in bf16 where it is improbable."""
TOY_LAYERS = 4


def prompts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """PROMPTS lists of TOKENS seeded ids, none of them special."""
    allowed = torch.tensor([i for i in range(plan.vocab_size) if i not in plan.special_ids])
    generator = torch.Generator().manual_seed(_SEED)
    chosen = allowed[torch.randint(len(allowed), (PROMPTS, TOKENS), generator=generator)]
    return tuple(tuple(row) for row in chosen.tolist())


def bounds(plan: Plan, engine_dtype: str) -> tuple[float, float]:
    """(largest, mean) |difference| in nats that an engine of this dtype may show."""
    if engine_dtype == "float32":
        largest = FP32_TOY if plan.layers <= TOY_LAYERS else FP32
        return largest, largest
    return BF16_MAX, BF16_MEAN


def score(policy: Policy, engine_dtype: str) -> Canary:
    """The canary of the policy as it is now. Raises ArithmeticError when a score is not finite."""
    ids = prompts(policy.plan)
    rows = [policy.score_sequence(torch.tensor(row)) for row in ids]
    if not all(torch.isfinite(row).all() for row in rows):
        raise ArithmeticError("the updated weights give logprobs that are not finite; lower the learning rate")
    largest, mean = bounds(policy.plan, engine_dtype)
    return Canary(prompts=ids, logprobs=tuple(tuple(row.tolist()) for row in rows), max_abs=largest, mean_abs=mean)
