"""Applies the experts of a layer to a long row in chunks of some thousand tokens, forward and backward.

`apply` returns what `routed.apply` returns, but saves only its inputs. Gathered rows, activations and their gradients, which
have topk rows per token, exist for one chunk at a time; the backward computes them again. It works on any device and never
waits for one. Gradients of weights and adapters are summed over the chunks in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import routed
from .routed import Order, Pair

TOKENS = 16_384
"""Tokens of a chunk. For the 30B-A3B shape a chunk needs 1.4 GB, and each expert still gets a thousand rows."""


def apply(
    x: Tensor, probs: Tensor, chosen: Tensor, weights: tuple[Tensor, Tensor], pairs: tuple[Pair, Pair] | None
) -> Tensor:
    """Return [T, hidden] from x [T, hidden], and probs and chosen expert ids [T, topk]. `weights`, `pairs`: see `routed.apply`."""
    masters = [tensor for pair in pairs or () for tensor in (pair.a, pair.b)]
    return _Pieces.apply(x, probs, chosen, pairs, *weights, *masters)


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, TOKENS):
        yield slice(start, min(start + TOKENS, count))


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, chosen: Tensor, pairs: Any, *tensors: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for here in _pieces(len(x)):
            out[here] = _one(x[here], probs[here], chosen[here], pairs, tensors)
        ctx.save_for_backward(x, probs, chosen, *tensors)
        ctx.pairs = pairs
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, probs, chosen, *tensors = ctx.saved_tensors
        asked = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        d_x, d_probs = torch.empty_like(x), torch.empty_like(probs)
        sums: list[Tensor | None] = [None] * len(tensors)
        for here in _pieces(len(x)):
            part, share = x[here].detach().requires_grad_(), probs[here].detach().requires_grad_()
            with torch.enable_grad():
                out = _one(part, share, chosen[here], ctx.pairs, tensors)
            # `grad` returns the parameters' gradients and leaves their `.grad` unchanged.
            d_x[here], d_probs[here], *found = torch.autograd.grad(
                out, [part, share, *(tensors[i] for i in asked)], grads[0][here]
            )
            for i, grad in zip(asked, found, strict=True):
                before = sums[i]
                sums[i] = grad.float() if before is None else before.add_(grad)
        given = (None if one is None else one.to(own.dtype) for one, own in zip(sums, tensors, strict=True))
        return d_x, d_probs, None, None, *given


def _one(x: Tensor, probs: Tensor, chosen: Tensor, pairs: Any, tensors: Any) -> Tensor:
    first, second = tensors[:2]
    return routed.apply(x, probs, Order.of(chosen, len(first)), (first, second), pairs)
