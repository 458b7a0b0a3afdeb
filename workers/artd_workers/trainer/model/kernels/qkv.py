"""Triton kernels of `qkv_split`: they make a token's queries, key and value from the joint product, and their gradient, in one
pass each.

They compute what `qkv_split.split_plainly` computes. Arithmetic is fp32, as in `sparse`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    source, weight, cos, sin, eps, NORM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the two halves of one head, normalised and rotated."""
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    low = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + cols, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
        low *= scale * tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
        high *= scale * tl.load(weight + HALF + cols, mask=mask, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _heads(  # type: ignore[no-untyped-def]
    mixed, q_weight, k_weight, cos, sin, q, k, v, size, eps,
    GROUPS: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    dim = 2 * HALF
    out = (token * GROUPS + group) * EACH * dim + cols
    here = mask & (token < size)
    turn = tl.load(cos + token * HALF + cols, mask=here, other=0.0)
    tilt = tl.load(sin + token * HALF + cols, mask=here, other=0.0)
    # Padding reads the last token; cosine and sine are 0 there, so the result is zero.
    source = mixed + (tl.minimum(token, size - 1) * GROUPS + group) * (EACH + 2) * dim
    for head in tl.static_range(EACH):
        low, high = _rotate(source + head * dim, q_weight, turn, tilt, eps, NORM, HALF, BLOCK)
        tl.store(q + out + head * dim, low, mask=mask)
        tl.store(q + out + head * dim + HALF, high, mask=mask)
    low, high = _rotate(source + EACH * dim, k_weight, turn, tilt, eps, NORM, HALF, BLOCK)
    v_low = tl.load(source + (EACH + 1) * dim + cols, mask=here, other=0.0)
    v_high = tl.load(source + (EACH + 1) * dim + HALF + cols, mask=here, other=0.0)
    for head in tl.static_range(EACH):
        tl.store(k + out + head * dim, low, mask=mask)
        tl.store(k + out + head * dim + HALF, high, mask=mask)
        tl.store(v + out + head * dim, v_low, mask=mask)
        tl.store(v + out + head * dim + HALF, v_high, mask=mask)


@triton.jit
def _rotate_backward(  # type: ignore[no-untyped-def]
    low, high, source, weight, cos, sin, eps, NORM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the gradient of one head's halves before `_rotate`, from the gradient of its results."""
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    low, high = low * cos + high * sin, high * cos - low * sin
    if NORM:
        a = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF + cols, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
        low *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
        high *= tl.load(weight + HALF + cols, mask=mask, other=0.0).to(tl.float32)
        along = (tl.sum(low * a, 0) + tl.sum(high * b, 0)) * scale * scale / (2 * HALF)
        low, high = scale * (low - a * along), scale * (high - b * along)
    return low, high


@triton.jit
def _heads_backward(  # type: ignore[no-untyped-def]
    dq, dk, dv, mixed, q_weight, k_weight, cos, sin, d_mixed, eps,
    q_token, q_head, k_token, k_head, v_token, v_head,
    GROUPS: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    dim = 2 * HALF
    turn = tl.load(cos + token * HALF + cols, mask=mask, other=0.0)
    tilt = tl.load(sin + token * HALF + cols, mask=mask, other=0.0)
    base = (token * GROUPS + group) * (EACH + 2) * dim
    k_low, k_high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    v_low, v_high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for head in tl.static_range(EACH):
        number = group * EACH + head
        at = dq + token * q_token + number * q_head + cols
        low, high = (
            tl.load(at, mask=mask, other=0.0).to(tl.float32),
            tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32),
        )
        low, high = _rotate_backward(low, high, mixed + base + head * dim, q_weight, turn, tilt, eps, NORM, HALF, BLOCK)
        tl.store(d_mixed + base + head * dim + cols, low, mask=mask)
        tl.store(d_mixed + base + head * dim + HALF + cols, high, mask=mask)
        at = dk + token * k_token + number * k_head + cols
        k_low += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        k_high += tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        at = dv + token * v_token + number * v_head + cols
        v_low += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        v_high += tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    k_low, k_high = _rotate_backward(
        k_low, k_high, mixed + base + EACH * dim, k_weight, turn, tilt, eps, NORM, HALF, BLOCK
    )
    at = d_mixed + base + EACH * dim + cols
    tl.store(at, k_low, mask=mask)
    tl.store(at + HALF, k_high, mask=mask)
    tl.store(at + dim, v_low, mask=mask)
    tl.store(at + dim + HALF, v_high, mask=mask)


def heads(mixed: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, padded: int, eps: float) -> Any:
    """Return q, k, v [padded, groups * each, dim] from mixed [s, groups, each + 2, dim]; see `qkv_split.split`."""
    size, groups, each, dim = mixed.shape
    q, k, v = (mixed.new_empty(padded, groups * (each - 2), dim) for _ in range(3))
    weights = (cos, cos) if norms is None else norms
    _heads[(padded, groups)](
        mixed, *weights, cos, sin, q, k, v, size, eps,
        GROUPS=groups, EACH=each - 2, HALF=dim // 2, NORM=norms is not None, BLOCK=triton.next_power_of_2(dim // 2),
        num_warps=1,
    )  # fmt: skip
    return q, k, v


def heads_backward(
    grads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of `mixed` from those of q, k, v, whose last stride is 1."""
    size, groups, each, dim = mixed.shape
    out = torch.empty_like(mixed)
    weights = (cos, cos) if norms is None else norms
    _heads_backward[(size, groups)](
        *grads, mixed, *weights, cos, sin, out, eps, *(grad.stride(i) for grad in grads for i in (0, 1)),
        GROUPS=groups, EACH=each - 2, HALF=dim // 2, NORM=norms is not None, BLOCK=triton.next_power_of_2(dim // 2),
        num_warps=1,
    )  # fmt: skip
    return out
