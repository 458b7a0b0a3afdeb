"""Applies the experts of a layer to routed tokens: one function with its own backward, for any device.

`apply` sorts tokens by expert, multiplies them in grouped products with their adapters, and sums each token's results. It is
one function because autograd over the single steps would write every product of an adapter to memory and read it again to add
it. It never waits for the device. On a GPU, `kernels.sparse` and `kernels.adapted` do the steps between the products, elsewhere
the plain torch of this file. Gradients of adapters reach their fp32 masters row by row; those of frozen weights are not
computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Which expert gets which rows.

    `order`: int64 [R], the slot (token * topk + choice) of each row, sorted by expert. `place`: the inverse of `order`. `ends`:
    int32 [experts], where each expert's rows end.
    """

    order: Tensor
    place: Tensor
    ends: Tensor
    topk: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Order:
        """Sort the rows of these choices. `chosen`: expert ids [T, topk]."""
        # With few bits the radix sort needs one pass.
        kind = torch.uint8 if experts <= 256 else torch.int32
        found, order = chosen.flatten().to(kind).sort(stable=True)
        ids = torch.arange(experts, device=chosen.device, dtype=kind)
        ends = torch.searchsorted(found, ids, right=True, out_int32=True)
        place = torch.empty_like(order)
        place.scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(order, place, ends, chosen.shape[1])

    @classmethod
    def of_sorted(cls, counts: Tensor, rows: int) -> Order:
        """Return the order of rows that are already sorted by expert. `counts`: rows of each expert."""
        order = torch.arange(rows, device=counts.device)
        return cls(order, order, counts.cumsum(0).to(torch.int32), 1)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Its tensors, in the order of the fields."""
        return self.order, self.place, self.ends


class Pair(Protocol):
    """The adapters of one linear of all experts. `a`: fp32 [experts, parts, r, in]; `b`: fp32 [experts, parts, out of a part,
    r]."""

    a: Tensor
    b: Tensor
    scale: float

    def join(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [experts, R, in], scaled, and B [experts, out, R]."""
        ...

    def gradients(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `a` and `b` from those of what `join` returned."""
        ...


def apply(
    x: Tensor, probs: Tensor, order: Order, weights: tuple[Tensor, Tensor], pairs: tuple[Pair, Pair] | None
) -> Tensor:
    """Return [T, hidden] from x [T, hidden] and probs [T, topk].

    `weights`: [experts, 2 inner, hidden] and [experts, hidden, inner]. `pairs`: their adapters; with adapters the weights are
    frozen.
    """
    if pairs is None:
        return _Bare.apply(x, probs, order, *weights)
    masters = (tensor for pair in pairs for tensor in (pair.a, pair.b))
    return _Adapted.apply(x, probs, order, pairs, *weights, *masters)


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, way: Order, first: Tensor, second: Tensor) -> Tensor:
        steps, flat = _steps(x), probs.flatten()
        rows = steps.take(x, way.order, way.topk)
        both = F.grouped_mm(rows, first.transpose(1, 2), offs=way.ends)
        inner = steps.activate(both, flat, way.order)
        del rows
        out = F.grouped_mm(inner, second.transpose(1, 2), offs=way.ends)
        # `rows` are not saved: gathering them again is cheap, and for 48 layers of the 30B-A3B shape they take 10 GB.
        ctx.save_for_backward(x, probs, *way.tensors, first, second, both)
        ctx.topk = way.topk
        return steps.collect(out, way.place, way.topk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, probs, order, place, ends, first, second, both = ctx.saved_tensors
        steps, topk, needed = _steps(x), ctx.topk, ctx.needs_input_grad[3:]
        slope = steps.take(grads[0].contiguous(), order, topk)
        d_inner = F.grouped_mm(slope, second, offs=ends)
        d_both, d_probs, inner = steps.activate_backward(d_inner, both, probs.flatten(), order)
        d_second = F.grouped_mm(slope.t(), inner, offs=ends) if needed[1] else None
        del slope, inner, d_inner
        d_x = steps.collect(F.grouped_mm(d_both, first, offs=ends), place, topk)
        d_first = F.grouped_mm(d_both.t(), steps.take(x, order, topk), offs=ends) if needed[0] else None
        return d_x, d_probs.view_as(probs), None, d_first, d_second


class _Adapted(torch.autograd.Function):
    """Computes `_Bare` with adapters. Rows are gathered again where they are needed, because the tokens take an eighth of their
    memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, way: Order, pairs: Any, *tensors: Tensor) -> Tensor:
        first, second = tensors[:2]
        steps, thin = _steps(x), _adapted_steps(x)
        (a1, b1), (a2, b2) = (pair.join(x.dtype) for pair in pairs)
        rows, low1 = thin.gather(x, way, a1.transpose(1, 2))
        both = F.grouped_mm(rows, first.transpose(1, 2), offs=way.ends)
        del rows
        inner, low2 = thin.activate(both, low1, b1, a2, probs.flatten(), way)
        out = F.grouped_mm(inner, second.transpose(1, 2), offs=way.ends)
        thin.widen(out, low2, b2.transpose(1, 2), way)
        ctx.save_for_backward(x, probs, *way.tensors, first, second, both, low1, low2)
        ctx.topk, ctx.pairs = way.topk, pairs
        return steps.collect(out, way.place, way.topk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, probs, order, place, ends, first, second, both, low1, low2 = ctx.saved_tensors
        steps, thin, grad = _steps(x), _adapted_steps(x), grads[0].contiguous()
        way = Order(order, place, ends, ctx.topk)
        (a1, b1), (a2, b2) = (pair.join(x.dtype) for pair in ctx.pairs)
        slope, small = thin.gather(grad, way, b2)
        d_inner = F.grouped_mm(slope, second, offs=way.ends)
        del slope
        d_both, d_probs, inner, small1 = thin.activate_backward(d_inner, small, a2, both, b1, probs.flatten(), way)
        found2 = thin.gradients(ctx.pairs[1], way, (inner, False), low2, (grad, True), small)
        del d_inner, inner
        d_rows = F.grouped_mm(d_both, first, offs=way.ends)
        thin.widen(d_rows, small1, a1, way)
        d_x = steps.collect(d_rows, way.place, way.topk)
        found1 = thin.gradients(ctx.pairs[0], way, (x, True), low1, (d_both, False), small1)
        return d_x, d_probs.view_as(probs), None, None, None, None, *found1, *found2


def _steps(x: Tensor) -> Any:
    if not x.is_cuda:
        return Plain
    from artd_workers.trainer.model.kernels import sparse

    return sparse


def _adapted_steps(x: Tensor) -> Any:
    if not x.is_cuda:
        return PlainAdapted
    from artd_workers.trainer.model.kernels import adapted

    return adapted


class Plain:
    """`kernels.sparse` in plain torch."""

    @staticmethod
    def take(x: Tensor, order: Tensor, topk: int) -> Tensor:
        return x[order // topk]

    @staticmethod
    def collect(y: Tensor, place: Tensor, topk: int) -> Tensor:
        return y[place].unflatten(0, (-1, topk)).sum(1)

    @staticmethod
    def activate(both: Tensor, probs: Tensor, order: Tensor) -> Tensor:
        gate, up = both.float().chunk(2, -1)
        return (F.silu(gate) * up * probs[order, None]).to(both.dtype)

    @staticmethod
    def activate_backward(grad: Tensor, both: Tensor, probs: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, (gate, up) = grad.float(), both.float().chunk(2, -1)
        soft = gate.sigmoid()
        inner = gate * soft * up
        d_probs = torch.empty_like(probs)
        d_probs[order] = (slope * inner).sum(-1).to(probs.dtype)
        slope = slope * probs[order, None]
        d_both = torch.cat((slope * up * soft * (1 + gate * (1 - soft)), slope * gate * soft), -1)
        return d_both.to(both.dtype), d_probs, (inner * probs[order, None]).to(both.dtype)


class PlainAdapted:
    """`kernels.adapted` in plain torch."""

    @staticmethod
    def gather(x: Tensor, way: Order, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = Plain.take(x, way.order, way.topk)
        return rows, F.grouped_mm(rows, weight, offs=way.ends)

    @staticmethod
    def widen(y: Tensor, low: Tensor, weight: Tensor, way: Order) -> None:
        y += F.grouped_mm(low, weight, offs=way.ends)

    @staticmethod
    def activate(both: Tensor, low: Tensor, b: Tensor, a: Tensor, probs: Tensor, way: Order) -> tuple[Tensor, Tensor]:
        PlainAdapted.widen(both, low, b.transpose(1, 2), way)
        inner = Plain.activate(both, probs, way.order)
        return inner, F.grouped_mm(inner, a.transpose(1, 2), offs=way.ends)

    @staticmethod
    def activate_backward(
        grad: Tensor, low: Tensor, a: Tensor, both: Tensor, b: Tensor, probs: Tensor, way: Order
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        whole = grad + F.grouped_mm(low, a, offs=way.ends)
        d_both, d_probs, inner = Plain.activate_backward(whole, both, probs, way.order)
        return d_both, d_probs, inner, F.grouped_mm(d_both, b, offs=way.ends)

    @staticmethod
    def gradients(
        pair: Pair, way: Order, x: tuple[Tensor, bool], low: Tensor, slope: tuple[Tensor, bool], d_low: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, slopes = (Plain.take(it, way.order, way.topk) if by_token else it for it, by_token in (x, slope))
        return pair.gradients(
            F.grouped_mm(d_low.t(), rows, offs=way.ends), F.grouped_mm(slopes.t(), low, offs=way.ends)
        )
