"""The canary of a checkpoint: fixed prompts and what the trainer thinks of them.

Purpose: an engine that claims to serve a checkpoint must give the same logprobs. Owner of: no state.
Invariants: prompts depend on the vocabulary and the special ids alone, so that all checkpoints of a run share them.
"""

from __future__ import annotations

import math

import torch

from artd_schema.manifest import Canary

from ..models.base import Plan
from .layers import narrowest_choices
from .model import Policy
from .tree import hidden

PROMPTS, TOKENS = 4, 32
_SEED = 20_640
FP32_TOY, FP32, BF16_MEAN, BF16_MAX = 1e-5, 2e-4, 0.05, 2.0
"""Bounds in nats: fp32 models of at most `TOY_LAYERS` layers, other fp32 ones, the mean of bf16 engines; a single token may
stray much further in bf16 where it is improbable."""
ROUTED_MEAN, ROUTED_MAX = 0.2, 4.0
"""The same where rounding may send a token to another expert. Seen in bf16 with random weights of std 0.08 to 0.3: means of
0.02 to 0.11, single tokens up to 1.5."""
TIE = 2.0
"""An fp32 engine may choose otherwise where two experts' logits are closer than this many times its bound."""
TOY_LAYERS = 4


def prompts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """PROMPTS lists of TOKENS seeded ids, none of them special."""
    allowed = torch.tensor([i for i in range(plan.vocab_size) if i not in plan.special_ids])
    generator = torch.Generator().manual_seed(_SEED)
    chosen = allowed[torch.randint(len(allowed), (PROMPTS, TOKENS), generator=generator)]
    return tuple(tuple(row) for row in chosen.tolist())


def bounds(plan: Plan, engine_dtype: str, gap: float = math.inf) -> tuple[float, float]:
    """(largest, mean) |difference| in nats that an engine of this dtype may show.

    gap: smallest distance of router logits that decided for an expert in the canary's tokens (inf: no routers).
    """
    routed = (ROUTED_MAX, ROUTED_MEAN)
    if engine_dtype != "float32":
        return (BF16_MAX, BF16_MEAN) if plan.routes is None else routed
    largest = FP32_TOY if plan.layers <= TOY_LAYERS else FP32
    return (largest, largest) if gap > TIE * largest else routed


def score(policy: Policy, engine_dtype: str) -> Canary:
    """The canary of the policy as it is now. Raises ArithmeticError when a score is not finite."""
    ids = prompts(policy.plan)
    tokens = torch.tensor(ids)
    # All prompts in one row, each a tree of its own: the weights are read once instead of once per prompt.
    until = torch.arange(1, PROMPTS + 1).repeat_interleave(TOKENS) * TOKENS
    rows = torch.arange(PROMPTS * TOKENS).view(PROMPTS, TOKENS)[:, :-1].flatten()
    targets = tokens[:, 1:].flatten()
    positions = torch.arange(TOKENS).repeat(PROMPTS)
    with torch.no_grad(), narrowest_choices(policy.model) as gaps:
        # The dense mask: for so few tokens a GPU need not compile an attention of its own.
        seen, heat = hidden(until), torch.ones(len(targets))
        found = policy.score(tokens.flatten(), positions, seen, rows, targets, heat).logprobs
    if not torch.isfinite(found).all():
        raise ArithmeticError("the updated weights give logprobs that are not finite; lower the learning rate")
    if policy.model.config.params_dtype != torch.float32:
        engine_dtype = "bfloat16"  # the trainer's own rounding is as coarse
    largest, mean = bounds(policy.plan, engine_dtype, min(gaps, default=math.inf))
    logprobs = tuple(tuple(row) for row in found.view(PROMPTS, TOKENS - 1).tolist())
    return Canary(prompts=ids, logprobs=logprobs, max_abs=largest, mean_abs=mean)
