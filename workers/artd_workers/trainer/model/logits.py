"""The language-model head: computes the logprob of each chosen token, and the entropy.

`score_targets` goes from hidden states to both without the logits of all tokens: it computes `CHUNK` tokens at a time and keeps
none. No tensor here has more than CHUNK x (this rank's words) numbers, but the weight and its gradient. A rank holds the logits
of its own part of the vocabulary, and ranks exchange five numbers per token. Softmax and sums are fp32, whatever the logits
are. On the CPU nothing is compiled.

With a frozen weight (an adapter is trained) this needs no more products than logits that are kept: while a chunk's logits
exist, the forward computes what the backward multiplies by one number per token. With a trained weight, the backward computes
the chunks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2048
"""Tokens whose logits exist at the same time: 0.6 GB of bf16 for 151,936 words, and as much for their gradient."""


def score_targets(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, group: dist.ProcessGroup | None = None,
    entropy_gradient: bool = False,
) -> Tensor:  # fmt: skip
    """Return fp32 [2, n]: logprobs (natural logarithm) of `targets` [n], and entropies in nats, which have a gradient only with
    `entropy_gradient`.


    `hidden`: [n, h] after the final norm. `weight`: [words, h]. `temperatures`: [n], above 0. `group`: of ranks that each hold
    equally many words, in rank order. Collective: the ranks of `group` call it with equal `hidden`; the gradients of `hidden`
    are then parts of a sum.
    """
    return _Scored.apply(hidden, weight, targets, temperatures, group, torch.is_grad_enabled(), entropy_gradient)


def chunks(count: int) -> Iterator[slice]:
    """Yield slices of CHUNK tokens that cover `count` tokens, in order."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor,
        group: dist.ProcessGroup | None, graded: bool, entropy: bool,
    ) -> Tensor:  # fmt: skip
        own = targets if group is None else targets - len(weight) * dist.get_rank(group)
        found = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        ready = graded and not ctx.needs_input_grad[1]
        # The slopes of the logprobs, and of the entropies if `entropy` asks for them.
        slopes = [torch.empty_like(hidden) for _ in range(1 + entropy)] if ready else []
        for here in chunks(len(hidden)):
            _chunk(
                hidden[here], weight, own[here], temperatures[here], group, found[:, here], [x[here] for x in slopes]
            )
        ctx.entropy, ctx.ready = entropy, ready
        if ready:
            ctx.save_for_backward(temperatures, *slopes)
        else:
            ctx.save_for_backward(temperatures, hidden, weight, own, found[1:])
        return found[:2].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        temperatures, *rest = ctx.saved_tensors
        scales = [grad / temperatures for grad in grads[0][: 1 + ctx.entropy]]
        if ctx.ready:
            # `out` has the right dtype; the product alone would be fp32, twice as large.
            d_hidden = torch.mul(rest[0], scales[0][:, None], out=torch.empty_like(rest[0]))
            for slopes, scale in zip(rest[1:], scales[1:], strict=True):
                d_hidden += torch.mul(slopes, scale[:, None], out=torch.empty_like(slopes))
            return d_hidden, *([None] * 6)
        hidden, weight, own, totals = rest
        d_hidden, d_weight = _again(hidden, weight, own, totals, temperatures, scales, ctx.needs_input_grad[0])
        return d_hidden, d_weight, *([None] * 5)


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, group: dist.ProcessGroup | None, found: Tensor,
    slopes: list[Tensor],
) -> None:  # fmt: skip
    """Fill found [4, n], with the result of `_join_ranks`, and of slopes [n, h] as many as there are: the gradients of logprob x temperature, and of
    entropy x temperature."""
    statistics, slope, entropy_slope = _steps(hidden)
    logits = hidden @ weight.t()
    found.copy_(_join_ranks(statistics(logits, targets, temperatures), group))
    ones = torch.ones_like(temperatures)
    if slopes:
        slopes[0].copy_(slope(logits, targets, temperatures, found[2:], ones) @ weight)
    if len(slopes) > 1:
        slopes[1].copy_(entropy_slope(logits, temperatures, found[1:], ones) @ weight)


def _again(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    totals: Tensor,
    temperatures: Tensor,
    scales: list[Tensor],
    wanted: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of hidden, if wanted, and of the weight, which is summed over the chunks in fp32. `totals`: [3, n], the entropy and
    the two numbers that `_slope` takes. `scales`: what a logprob and, where there are two, an entropy counts."""
    d_hidden = torch.empty_like(hidden) if wanted else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32)
    _, slope, entropy_slope = _steps(hidden)
    for here in chunks(len(hidden)):
        logits = hidden[here] @ weight.t()
        grad = slope(logits, targets[here], temperatures[here], totals[1:, here], scales[0][here])
        for scale in scales[1:]:
            grad = grad + entropy_slope(logits, temperatures[here], totals[:, here], scale[here])
        del logits
        if d_hidden is not None:
            d_hidden[here] = grad @ weight
        if weight.is_cuda and weight.dtype != torch.float32:
            d_weight.add_(torch.mm(grad.t(), hidden[here], out_dtype=torch.float32))
        else:  # a CPU cannot multiply bf16 into fp32
            d_weight.addmm_(grad.t().float(), hidden[here].float())
    return d_hidden, d_weight.to(weight.dtype)


def _join_ranks(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return [4, n] from each rank's `_statistics` of its words: logprob, entropy, and the two totals of all words. Collective."""
    every = parts[None]
    if group is not None:
        every = parts.new_empty(dist.get_world_size(group), *parts.shape)
        dist.all_gather_into_tensor(every.view(-1, parts.shape[1]), parts.contiguous(), group=group)
    largest, sums, entropies, chosen, here = every.unbind(1)
    most = largest.amax(0)
    sums = largest - most + sums
    total = sums.logsumexp(0)
    share = sums - total  # logarithm of the probability of a rank's words
    logprob = (here * (chosen + largest - most)).sum(0) - total
    return torch.stack((logprob, (share.exp() * (entropies - share)).sum(0), most, total))


def _steps(hidden: Tensor) -> tuple[Any, Any, Any]:
    return _compile() if hidden.is_cuda else (_statistics, _slope, _entropy_slope)


@lru_cache(1)
def _compile() -> tuple[Any, Any, Any]:
    return torch.compile(_statistics), torch.compile(_slope), torch.compile(_entropy_slope)


def _statistics(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Return fp32 [5, n] of these words.

    They are: the largest scaled logit m, log(sum(exp(logit - m))), the entropy of the words' own softmax, the target's logit -
    m, and 1 where the target is among the words (otherwise the last two are 0). m is apart, because adding it would round small
    logprobs away.
    """
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
    """Return the gradient of the target's logprob in the scaled logits, times scale [n], in the logits' dtype.

    `totals`: [2, n], the largest logit m of all words and log(sum(exp(logit - m))).
    """
    chosen = torch.arange(logits.shape[-1], device=logits.device)[None, :] == targets[:, None]
    share = (logits.float() / temperatures[:, None] - totals[0][:, None] - totals[1][:, None]).exp()
    return ((chosen.float() - share) * scale[:, None]).to(logits.dtype)


def _entropy_slope(logits: Tensor, temperatures: Tensor, totals: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the entropy H in the scaled logits, -p (log p + H), times scale [n], in the logits' dtype.

    `totals`: [3, n], H and the two of `_slope`.
    """
    logs = logits.float() / temperatures[:, None] - totals[1][:, None] - totals[2][:, None]
    return (-logs.exp() * (logs + totals[0][:, None]) * scale[:, None]).to(logits.dtype)
