"""Triton kernels of sparse layers and norms: one pass over memory where plain torch needs several.

`routed` and frozen norms call them on a GPU; `routed.Plain` says in plain torch what each computes. Sums and products are fp32,
whatever the tensors are. No length is compiled in, so rows of any length use the same kernel. It is imported only where tensors
are on a GPU, or by tests in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _take(x, order, out, WIDTH: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    source = tl.load(order + row) // TOPK
    values = tl.load(x + source * WIDTH + cols, mask=cols < WIDTH)
    tl.store(out + row * WIDTH + cols, values, mask=cols < WIDTH)


def take(x: Tensor, order: Tensor, topk: int) -> Tensor:
    """Return x[order // topk] [len(order), width] from x [T, width]."""
    width = x.shape[1]
    out = x.new_empty(len(order), width)
    _take[(len(order),)](x, order, out, WIDTH=width, TOPK=topk, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _collect(y, place, out, WIDTH: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOPK):
        at = tl.load(place + token * TOPK + k) * WIDTH + cols
        total += tl.load(y + at, mask=cols < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + cols, total, mask=cols < WIDTH)


def collect(y: Tensor, place: Tensor, topk: int) -> Tensor:
    """Return for each token the sum of its rows y[place]. y [T * topk, width], place [T * topk]."""
    tokens, width = len(place) // topk, y.shape[1]
    out = y.new_empty(tokens, width)
    _collect[(tokens,)](y, place, out, WIDTH=width, TOPK=topk, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _activate(both, probs, order, out, INNER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < INNER
    at = row * 2 * INNER + cols
    gate = tl.load(both + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + at + INNER, mask=mask, other=0.0).to(tl.float32)
    prob = tl.load(probs + tl.load(order + row)).to(tl.float32)
    tl.store(out + row * INNER + cols, gate * tl.sigmoid(gate) * up * prob, mask=mask)


def activate(both: Tensor, probs: Tensor, order: Tensor) -> Tensor:
    """Return silu(gate) * up * probs[order] [R, inner] from both [R, 2 inner]. `probs`: flat."""
    rows, inner = len(both), both.shape[1] // 2
    out = both.new_empty(rows, inner)
    _activate[(rows,)](both, probs, order, out, INNER=inner, BLOCK=triton.next_power_of_2(inner))
    return out


@triton.jit
def _activate_backward(  # type: ignore[no-untyped-def]
    grad, both, probs, order, d_both, out, d_probs, INNER: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < INNER
    here, at = row * INNER + cols, row * 2 * INNER + cols
    slope = tl.load(grad + here, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(both + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + at + INNER, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(order + row)
    prob = tl.load(probs + slot).to(tl.float32)
    soft = tl.sigmoid(gate)
    inner = gate * soft * up
    tl.store(d_probs + slot, tl.sum(slope * inner, 0))
    slope *= prob
    tl.store(d_both + at, slope * up * soft * (1 + gate * (1 - soft)), mask=mask)
    tl.store(d_both + at + INNER, slope * gate * soft, mask=mask)
    tl.store(out + here, inner * prob, mask=mask)


def activate_backward(grad: Tensor, both: Tensor, probs: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `both` and of the flat `probs` of `activate`, and its output again."""
    rows, inner = grad.shape
    d_both, out, d_probs = torch.empty_like(both), torch.empty_like(grad), torch.empty_like(probs)
    _activate_backward[(rows,)](
        grad, both, probs, order, d_both, out, d_probs, INNER=inner, BLOCK=triton.next_power_of_2(inner)
    )
    return d_both, d_probs, out


# ---- norms ----------------------------------------------------------------------------------------------------------


@triton.jit
def _norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    value = tl.load(x + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + cols, value * scale * tl.load(weight + cols, mask=mask).to(tl.float32), mask=mask)


@triton.jit
def _norm_backward(grad, x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    value = tl.load(x + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    slope *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    along = tl.sum(slope * value, 0) * scale * scale / WIDTH
    tl.store(out + row * WIDTH + cols, scale * (slope - value * along), mask=mask)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension of a contiguous x."""
    out, width = torch.empty_like(x), x.shape[-1]
    _norm[(x.numel() // width,)](x, weight, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the gradient of x from that of `norm`'s result; both are contiguous."""
    out, width = torch.empty_like(x), x.shape[-1]
    _norm_backward[(x.numel() // width,)](grad, x, weight, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out
