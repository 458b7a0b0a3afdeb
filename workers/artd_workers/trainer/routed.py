"""The experts of a layer applied to routed tokens: one function with a backward of its own, for any device.

Purpose: `apply` sorts tokens by expert, multiplies them in grouped products with their adapters, and adds each token's results
up. Written as one function, because autograd over the single steps writes every product of an adapter to memory and reads it
again to add it. Owner of: no state.
Invariants: no wait for the device; on a GPU the steps between the products are `kernels`', elsewhere the plain torch of this
file; gradients of adapters reach their fp32 masters row by row, those of frozen weights are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Which expert gets which rows. order: int64 [R], slot (token * topk + choice) of each row, sorted by expert; place: its
    inverse; ends: int32 [experts], where each expert's rows end."""

    order: Tensor
    place: Tensor
    ends: Tensor
    topk: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Order:
        """chosen: expert ids [T, topk]."""
        # Few bits to sort by: one pass of a radix sort.
        kind = torch.uint8 if experts <= 256 else torch.int32
        found, order = chosen.flatten().to(kind).sort(stable=True)
        ids = torch.arange(experts, device=chosen.device, dtype=kind)
        ends = torch.searchsorted(found, ids, right=True, out_int32=True)
        place = torch.empty_like(order)
        place.scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(order, place, ends, chosen.shape[1])

    @classmethod
    def sorted(cls, counts: Tensor, rows: int) -> Order:
        """Of rows that lie expert by expert already; counts: of each expert."""
        order = torch.arange(rows, device=counts.device)
        return cls(order, order, counts.cumsum(0).to(torch.int32), 1)


class Pair(Protocol):
    """Adapters of one linear of all experts."""

    a: Tensor
    b: Tensor

    def joined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [experts, r, in], scaled, and B [experts, out, r]."""
        ...

    def gradients(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of what `joined` gave -> of `a` and `b`."""
        ...


def apply(x: Tensor, probs: Tensor, order: Order, weights: Sequence[Tensor], pairs: Sequence[Pair | None]) -> Tensor:
    """x [T, hidden], probs [T, topk] -> [T, hidden]. weights: [experts, 2 inner, hidden] and [experts, hidden, inner]."""
    masters = [tensor for pair in pairs if pair is not None for tensor in (pair.a, pair.b)]
    return _Routed.apply(x, probs, order, tuple(pairs), *weights, *masters)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, order: Order, pairs: Any, *tensors: Tensor) -> Tensor:
        first, second = tensors[:2]
        steps, flat = _steps(x), probs.flatten()
        rows = steps.take(x, order.order, order.topk)
        both, more, low1 = _forward(rows, first, pairs[0], order.ends)
        inner = steps.activate(both, more, flat, order.order)
        del rows, more
        out, more, low2 = _forward(inner, second, pairs[1], order.ends)
        # Not `rows`: to gather them again is cheap, and for 48 layers of the 30B-A3B shape they are 10 GB.
        ctx.save_for_backward(x, probs, order.order, order.place, order.ends, first, second, both, low1, low2)
        ctx.topk, ctx.pairs, ctx.given = order.topk, pairs, len(tensors)
        return steps.collect(out, more, order.place, order.topk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, probs, order, place, ends, first, second, both, low1, low2 = ctx.saved_tensors
        steps, needed, topk = _steps(x), ctx.needs_input_grad[4:], ctx.topk
        slope = steps.take(grads[0].contiguous(), order, topk)
        d_inner, more, small = _backward(slope, second, ctx.pairs[1], ends)
        d_both, d_probs, inner = steps.activate_backward(d_inner, more, both, probs.flatten(), order)
        found2 = _gradients(slope, inner, small, low2, ctx.pairs[1], ends)
        d_second = F.grouped_mm(slope.t(), inner, offs=ends) if needed[1] else None
        del slope, inner, d_inner, more
        d_rows, more, small = _backward(d_both, first, ctx.pairs[0], ends)
        d_x = steps.collect(d_rows, more, place, topk)
        del d_rows, more
        rows = steps.take(x, order, topk) if needed[0] or ctx.pairs[0] is not None else x
        found1 = _gradients(d_both, rows, small, low1, ctx.pairs[0], ends)
        d_first = F.grouped_mm(d_both.t(), rows, offs=ends) if needed[0] else None
        return d_x, d_probs.view_as(probs), None, None, d_first, d_second, *found1, *found2


def _forward(x: Tensor, weight: Tensor, pair: Pair | None, ends: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The product [R, out], its adapters' addition, and what these have between their two matrices."""
    out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if pair is None:
        return out, None, None
    a, b = pair.joined(x.dtype)
    low = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
    return out, F.grouped_mm(low, b.transpose(1, 2), offs=ends), low


def _backward(
    slope: Tensor, weight: Tensor, pair: Pair | None, ends: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of the input [R, in] through the weight, through the adapters, and that between their matrices."""
    out = F.grouped_mm(slope, weight, offs=ends)
    if pair is None:
        return out, None, None
    a, b = pair.joined(slope.dtype)
    low = F.grouped_mm(slope, b, offs=ends)
    return out, F.grouped_mm(low, a, offs=ends), low


def _gradients(
    slope: Tensor, x: Tensor, d_low: Tensor | None, low: Tensor | None, pair: Pair | None, ends: Tensor
) -> tuple[Tensor, ...]:
    if pair is None or d_low is None or low is None:
        return ()
    return pair.gradients(F.grouped_mm(d_low.t(), x, offs=ends), F.grouped_mm(slope.t(), low, offs=ends))


def _steps(x: Tensor) -> Any:
    if not x.is_cuda:
        return Plain
    from . import kernels

    return kernels


class Plain:
    """`kernels` in plain torch."""

    @staticmethod
    def take(x: Tensor, order: Tensor, topk: int) -> Tensor:
        return x[order // topk]

    @staticmethod
    def collect(y: Tensor, more: Tensor | None, place: Tensor, topk: int) -> Tensor:
        return (y if more is None else y + more)[place].unflatten(0, (-1, topk)).sum(1)

    @staticmethod
    def activate(both: Tensor, more: Tensor | None, probs: Tensor, order: Tensor) -> Tensor:
        if more is not None:
            both.add_(more)
        gate, up = both.float().chunk(2, -1)
        return (F.silu(gate) * up * probs[order, None]).to(both.dtype)

    @staticmethod
    def activate_backward(
        grad: Tensor, more: Tensor | None, both: Tensor, probs: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        slope, (gate, up) = (grad if more is None else grad + more).float(), both.float().chunk(2, -1)
        soft = gate.sigmoid()
        inner = gate * soft * up
        d_probs = torch.empty_like(probs)
        d_probs[order] = (slope * inner).sum(-1).to(probs.dtype)
        slope = slope * probs[order, None]
        d_both = torch.cat((slope * up * soft * (1 + gate * (1 - soft)), slope * gate * soft), -1)
        return d_both.to(both.dtype), d_probs, (inner * probs[order, None]).to(both.dtype)
