"""The language-model head and what a step needs of it: the logprob of each chosen token, and the entropy.

Purpose: `scored` goes from hidden states to both without the logits of all tokens: it computes them `CHUNK` tokens at a time and
keeps none. Owner of: no state.
Invariants: no tensor here has more than CHUNK x (this rank's words) numbers but the weight and its gradient; a rank holds the logits
of its own part of the vocabulary alone, and ranks exchange five numbers a token; softmax and sums are fp32 whatever the
logits are; on the CPU nothing is compiled.
A frozen weight (an adapter is trained) costs no product more than logits that are kept: what the backward will multiply by
one number a token is made in the forward, while a chunk's logits are there. A trained weight's chunks are computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2048
"""Tokens whose logits exist at once: 0.6 GB of bf16 for 151,936 words, and as much of their gradient."""


def scored(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """fp32 [2, n]: logprobs (natural log) of `targets` [n], and entropies in nats, which give no gradient; at `temperatures` [n] (> 0).

    hidden: [n, h] behind the final norm; weight: [words, h]. group: of ranks that each hold as many words, in rank order; they
    call this together with equal hidden, and the gradients of hidden are parts of a sum.
    """
    return _Scored.apply(hidden, weight, targets, temperatures, group, torch.is_grad_enabled())


def chunks(count: int) -> Iterator[slice]:
    """Of `count` tokens, in order."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor,
        group: dist.ProcessGroup | None, graded: bool,
    ) -> Tensor:  # fmt: skip
        own = targets if group is None else targets - len(weight) * dist.get_rank(group)
        found = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        ready = graded and not ctx.needs_input_grad[1]
        slopes = torch.empty_like(hidden) if ready else None
        for here in chunks(len(hidden)):
            _chunk(hidden[here], weight, own[here], temperatures[here], group, found[:, here], slopes, here)
        if slopes is not None:
            ctx.save_for_backward(temperatures, slopes)
        else:
            ctx.save_for_backward(temperatures, hidden, weight, own, found[2:])
        return found[:2].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        temperatures, *rest = ctx.saved_tensors
        scale = grads[0][0] / temperatures
        if len(rest) == 1:
            (slopes,) = rest
            # Into a tensor of the right dtype: a product of its own would be fp32, twice as large.
            return torch.mul(slopes, scale[:, None], out=torch.empty_like(slopes)), *([None] * 5)
        hidden, weight, own, totals = rest
        d_hidden, d_weight = _again(hidden, weight, own, totals, temperatures, scale, ctx.needs_input_grad[0])
        return d_hidden, d_weight, None, None, None, None


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, group: dist.ProcessGroup | None, found: Tensor,
    slopes: Tensor | None, here: slice,
) -> None:  # fmt: skip
    """Fill found [4, n], as `_joined` gives it, and if asked slopes[here]: the gradient of logprob x temperature."""
    statistics, slope = _steps(hidden)
    logits = hidden @ weight.t()
    found.copy_(_joined(statistics(logits, targets, temperatures), group))
    if slopes is not None:
        slopes[here] = slope(logits, targets, temperatures, found[2:], torch.ones_like(temperatures)) @ weight


def _again(
    hidden: Tensor, weight: Tensor, targets: Tensor, totals: Tensor, temperatures: Tensor, scale: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients of hidden, if wanted, and of the weight, which is summed over the chunks in fp32."""
    d_hidden = torch.empty_like(hidden) if wanted else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32)
    _, slope = _steps(hidden)
    for here in chunks(len(hidden)):
        logits = hidden[here] @ weight.t()
        grad = slope(logits, targets[here], temperatures[here], totals[:, here], scale[here])
        del logits
        if d_hidden is not None:
            d_hidden[here] = grad @ weight
        if weight.is_cuda and weight.dtype != torch.float32:
            d_weight.add_(torch.mm(grad.t(), hidden[here], out_dtype=torch.float32))
        else:  # a CPU has no product of one dtype into another
            d_weight.addmm_(grad.t().float(), hidden[here].float())
    return d_hidden, d_weight.to(weight.dtype)


def _joined(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[4, n] from each rank's `_statistics` of its words: logprob, entropy, and the two numbers of all words."""
    every = parts[None]
    if group is not None:
        every = parts.new_empty(dist.get_world_size(group), *parts.shape)
        dist.all_gather_into_tensor(every.view(-1, parts.shape[1]), parts.contiguous(), group=group)
    largest, sums, entropies, chosen, here = every.unbind(1)
    most = largest.amax(0)
    sums = largest - most + sums
    total = sums.logsumexp(0)
    share = sums - total  # logarithm of what a rank's words have of all probability
    logprob = (here * (chosen + largest - most)).sum(0) - total
    return torch.stack((logprob, (share.exp() * (entropies - share)).sum(0), most, total))


def _steps(hidden: Tensor) -> tuple[Any, Any]:
    return _compiled() if hidden.is_cuda else (_statistics, _slope)


@lru_cache(1)
def _compiled() -> tuple[Any, Any]:
    return torch.compile(_statistics), torch.compile(_slope)


def _statistics(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Of these words, fp32 [5, n]: the largest scaled logit m, log(sum(exp(logit - m))), the entropy of their own softmax, the target's
    logit - m, and 1 where the target is among them (otherwise the last two are 0). Apart, because m + the rest would round away what
    small logprobs are made of."""
    scaled = logits.float() / temperatures[:, None]
    largest = scaled.amax(-1)
    scaled = scaled - largest[:, None]
    total = scaled.exp().sum(-1).log()
    logs = scaled - total[:, None]
    entropy = -(logs.exp() * logs).sum(-1)
    here = (targets >= 0) & (targets < logits.shape[-1])
    chosen = scaled.gather(-1, targets.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    return torch.stack((largest, total, entropy, torch.where(here, chosen, 0.0), here.float()))


def _slope(logits: Tensor, targets: Tensor, temperatures: Tensor, totals: Tensor, scale: Tensor) -> Tensor:
    """Gradient of the target's logprob in the scaled logits, times scale [n], in the logits' dtype. totals: [2, n], the largest logit of
    all words and what `_statistics` has beside it."""
    chosen = torch.arange(logits.shape[-1], device=logits.device)[None, :] == targets[:, None]
    share = (logits.float() / temperatures[:, None] - totals[0][:, None] - totals[1][:, None]).exp()
    return ((chosen.float() - share) * scale[:, None]).to(logits.dtype)
