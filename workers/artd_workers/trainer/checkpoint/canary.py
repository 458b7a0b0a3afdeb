"""Makes the canary of a checkpoint: fixed prompts, and the logprobs that the trainer gives their tokens.

An engine that serves the checkpoint must give the same logprobs. The prompts depend only on the vocabulary and the special ids,
so all checkpoints of a run share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from artd_schema.data.manifest import Canary
from artd_workers.models.base import Plan
from artd_workers.trainer.model.layers import narrowest_choices
from artd_workers.trainer.model.lora import without_adapter
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.model.rounding import perturb_rounding
from artd_workers.trainer.tree_mask import hidden

PROMPTS, TOKENS = 4, 32
_SEED = 20_640
FP32_TOY, FP32, BF16_MEAN, BF16_MAX = 1e-5, 2e-4, 0.05, 2.0
"""The smallest bounds in nats: for fp32 models of at most `TOY_LAYERS` layers, for other fp32 models, and for the mean and the maximum of bf16
engines. In bf16 a single improbable token may differ much more than the mean."""
ROUTED_MEAN, ROUTED_MAX = 0.2, 4.0
"""The smallest bounds where rounding may send a token to another expert. Measured in bf16 with random weights of std 0.08 to 0.3: means of
0.02 to 0.11, single tokens up to 1.5."""
COARSE, FINE = 3.0, 8.0
"""An engine's difference may be this many times the difference that `rounding.perturb_rounding` makes; deep or sharp models amplify rounding.

COARSE is for a trainer that rounds to bf16 itself, where one changed rounding changes all later ones (36 layers of Qwen3-8B with random weights on
an H200: a mean of 0.053, and the engine differed by 0.044 to 0.058). FINE is for an fp32 trainer, where only the added roundings show (Hugging Face's
models in bf16 differed 1.5 to 3.5 times as much; in fp32, 3 to 24 layers with weights of std 0.02 to 0.25, 0.9 to 3.6 times in the mean and up
to 4.8 times at most)."""
TIE = 2.0
"""An fp32 engine may choose another expert where two experts' logits differ by less than this many times its bound."""
TOY_LAYERS = 4


def prompts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return PROMPTS lists of TOKENS seeded ids, none of them special."""
    allowed = torch.tensor([i for i in range(plan.vocab_size) if i not in plan.special_ids])
    generator = torch.Generator().manual_seed(_SEED)
    chosen = allowed[torch.randint(len(allowed), (PROMPTS, TOKENS), generator=generator)]
    return tuple(tuple(row) for row in chosen.tolist())


def bounds(
    plan: Plan, engine_dtype: str, gap: float = math.inf, room: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Return the (largest, mean) |difference| in nats that an engine of this dtype may show.

    `gap`: the smallest difference of router logits that decided for an expert in the canary's tokens (infinite without
    routers). `room`: (largest, mean) difference that rounding explains for this model; the result is at least as large.
    """
    routed = (ROUTED_MAX, ROUTED_MEAN)
    if engine_dtype != "float32":
        least = (BF16_MAX, BF16_MEAN) if plan.routes is None else routed
    else:
        least = (FP32_TOY, FP32_TOY) if plan.layers <= TOY_LAYERS else (FP32, FP32)
        if gap <= TIE * max(least[0], room[0]):
            least = routed
    return max(least[0], room[0]), max(least[1], room[1])


@dataclass(frozen=True)
class Row:
    """Tokens of one forward, as `Policy.hidden_logits` takes them, with the rows whose next token is scored."""

    tokens: Tensor
    positions: Tensor
    seen: Tensor
    rows: Tensor


def row(plan: Plan) -> Row:
    """Return all prompts in one row, each a tree of its own, so that the weights are read once and not once per prompt.

    Every token but the last of each prompt is scored.
    """
    until = torch.arange(1, PROMPTS + 1).repeat_interleave(TOKENS) * TOKENS
    rows = torch.arange(PROMPTS * TOKENS).view(PROMPTS, TOKENS)[:, :-1].flatten()
    # A dense mask, because compiling an attention kernel is not worth it for so few tokens.
    return Row(torch.tensor(prompts(plan)).flatten(), torch.arange(TOKENS).repeat(PROMPTS), hidden(until), rows)


def score(
    policy: Policy, engine_dtype: str, least: Callable[[float], float] = float, base: Base | None = None
) -> Canary:
    """Return the canary of the policy as it is now. Raises ArithmeticError when a score is not finite.

    `least` returns the smallest of all ranks' values, where several ranks make up the policy. `base`: the result of score_base,
    for an engine that is served the adapter alone.
    """
    asked = row(policy.plan)
    with narrowest_choices(policy.model) as gaps:
        found = logprobs(policy, asked)
    if not torch.isfinite(found).all():
        raise ArithmeticError("the updated weights give logprobs that are not finite; lower the learning rate")
    if policy.model.config.params_dtype != torch.float32:
        engine_dtype = "bfloat16"  # the trainer's own rounding is as coarse
    moved = measure_rounding(policy, asked, found, getattr(torch, engine_dtype))
    narrowest = min([*gaps, base.gap if base is not None else math.inf], default=math.inf)
    largest, mean = bounds(policy.plan, engine_dtype, least(narrowest), room(policy, moved))
    told = Canary(prompts=_rows(asked.tokens), logprobs=_rows(found), max_abs=largest, mean_abs=mean)
    if base is None:
        return told
    return replace(told, base=_rows(base.logprobs), rounding=float(moved.square().mean().sqrt()))


@dataclass(frozen=True)
class Base:
    """The canary without the adapter. `logprobs`: as from `logprobs`. `gap`: see `bounds`.

    An engine's rounding may choose another expert in these scores, too.
    """

    logprobs: Tensor
    gap: float


def score_base(policy: Policy) -> Base:
    with without_adapter(policy.model), narrowest_choices(policy.model) as gaps:
        found = logprobs(policy, row(policy.plan))
    return Base(found, min(gaps, default=math.inf))


def measure_rounding(policy: Policy, asked: Row, found: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the |difference| of each score when every module's output is rounded once to `dtype`. `found`: the scores without
    it."""
    with perturb_rounding(policy.model, dtype):
        return (logprobs(policy, asked) - found).abs()


def room(policy: Policy, moved: Tensor) -> tuple[float, float]:
    """Return the (largest, mean) difference in nats that rounding explains. `moved`: the result of `measure_rounding`."""
    times = FINE if _is_fine(policy) else COARSE
    return times * float(moved.max()), times * float(moved.mean())


def _is_fine(policy: Policy) -> bool:
    return bool(policy.model.config.params_dtype == torch.float32)


def _rows(flat: Tensor) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, flat.view(PROMPTS, -1).tolist()))


@torch.no_grad()
def logprobs(policy: Policy, asked: Row) -> Tensor:
    """Return the logprobs of the tokens after `asked.rows`, fp32 [n]."""
    targets = asked.tokens[asked.rows + 1]
    heat = torch.ones(len(targets))
    return policy.score(asked.tokens, asked.positions, asked.seen, asked.rows, targets, heat).logprobs
