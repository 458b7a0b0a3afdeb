"""Triton kernels of experts with adapters: they compute the adapters' thin products inside passes over memory that are needed
anyway.

`routed` calls them on a GPU where experts have adapters; `routed.PlainAdapted` says in plain torch what each computes. Separate
products would take as long as reading or writing each tensor once more. As in `sparse`, arithmetic is fp32. A program works on
rows of one expert, which it finds from `ends` alone. Every sum has one program and one order, so the same rows give the same
bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from artd_workers.trainer.model.experts.routed import Order, Pair


@dataclass(frozen=True)
class Tile:
    """What a program works on at a time, and its number of warps."""

    rows: int
    columns: int
    warps: int


TILES = {
    "gather": Tile(64, 128, 4), "widen": Tile(64, 128, 4), "activate": Tile(64, 64, 4), "activate_backward": Tile(64, 64, 4),
    "gradients": Tile(32, 128, 4),
}  # fmt: skip
"""The tiles of each function, the fastest on an H200 for the 30B-A3B shape (`tools/gpu/kernels.py`). They are fixed, because other tiles may give other
bits."""


@triton.jit
def _tile(ends, number, ROWS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (expert, first row, end of the expert's rows) of a tile of ROWS rows; the tile is empty where first >= end."""
    at = tl.arange(0, PADDED)
    end = tl.load(ends + at, mask=at < EXPERTS, other=0)
    begin = tl.load(ends + at - 1, mask=(at > 0) & (at < EXPERTS), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= number).to(tl.int32), 0)
    before = tl.sum(tl.where(at < expert, tiles, 0), 0)
    first = tl.sum(tl.where(at == expert, begin, 0), 0) + (number - before) * ROWS
    return expert.to(tl.int64), first, tl.sum(tl.where(at == expert, end, 0), 0)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    x, order, ends, weight, rows, low, by_expert, by_rank, by_column,
    WIDTH: tl.constexpr, TOPK: tl.constexpr, RANK: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(ends, tl.program_id(0), ROWS, EXPERTS, PADDED)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
    source = tl.load(order + row, mask=row < end, other=0) // TOPK
    rank = tl.arange(0, RANKS)
    weight += expert * by_expert
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = (row < end) & (column[None, :] < WIDTH)
        value = tl.load(x + source * WIDTH + column[None, :], mask=here, other=0)
        tl.store(rows + row * WIDTH + column[None, :], value, mask=here)
        there = (column[:, None] < WIDTH) & (rank[None, :] < RANK)
        factor = tl.load(weight + column[:, None] * by_column + rank[None, :] * by_rank, mask=there, other=0)
        total = tl.dot(value, factor, total, input_precision="ieee")
    tl.store(low + row * RANK + rank[None, :], total, mask=(row < end) & (rank[None, :] < RANK))


def gather(x: Tensor, way: Order, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows x[order // topk] [R, width], and the product of each with its expert's weight. x [T, width], weight [experts,
    width, r]."""
    count, width, rank = len(way.order), x.shape[1], weight.shape[2]
    rows, low = x.new_empty(count, width), x.new_empty(count, rank)
    by_expert, by_column, by_rank = weight.stride()
    tile = TILES["gather"]
    _gather[_programs(way, tile)](
        x, way.order, way.ends, weight, rows, low, by_expert, by_rank, by_column,
        WIDTH=width, TOPK=way.topk, RANK=rank, RANKS=_ranks(rank), **_sizes(way, tile),
    )  # fmt: skip
    return rows, low


@triton.jit
def _widen(  # type: ignore[no-untyped-def]
    y, low, ends, weight, by_expert, by_rank, by_column,
    WIDTH: tl.constexpr, RANK: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(ends, tl.program_id(0), ROWS, EXPERTS, PADDED)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
    rank = tl.arange(0, RANKS)
    small = tl.load(low + row * RANK + rank[None, :], mask=(row < end) & (rank[None, :] < RANK), other=0)
    weight += expert * by_expert
    for start in range(0, SPAN, COLUMNS):
        column = tl.program_id(1) * SPAN + start + tl.arange(0, COLUMNS)
        here = (row < end) & (column[None, :] < WIDTH)
        there = (rank[:, None] < RANK) & (column[None, :] < WIDTH)
        factor = tl.load(weight + rank[:, None] * by_rank + column[None, :] * by_column, mask=there, other=0)
        value = tl.load(y + row * WIDTH + column[None, :], mask=here, other=0).to(tl.float32)
        total = value + tl.dot(small, factor, input_precision="ieee")
        tl.store(y + row * WIDTH + column[None, :], total, mask=here)


def widen(y: Tensor, low: Tensor, weight: Tensor, way: Order) -> None:
    """Add to y [R, width], in place, the product of low [R, r] and its expert's weight [experts, r, width]."""
    width, rank = y.shape[1], low.shape[1]
    by_expert, by_rank, by_column = weight.stride()
    tile = TILES["widen"]
    span = min(512, triton.next_power_of_2(width))
    _widen[(*_programs(way, tile), triton.cdiv(width, span))](
        y, low, way.ends, weight, by_expert, by_rank, by_column,
        WIDTH=width, RANK=rank, RANKS=_ranks(rank), SPAN=span, **_sizes(way, tile),
    )  # fmt: skip


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    # 1 / (1 + exp(-x)) to 4e-7, in a third of the instructions, which would limit the passes below.
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _activate(  # type: ignore[no-untyped-def]
    both, low, b, a, probs, order, ends, out, low_out,
    INNER: tl.constexpr, RANK: tl.constexpr, RANK_OUT: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, RANKS_OUT: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(ends, tl.program_id(0), ROWS, EXPERTS, PADDED)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS).to(tl.int64)
    prob = tl.load(probs + tl.load(order + row, mask=row < end, other=0)).to(tl.float32)[:, None]
    row = row[:, None]
    rank, rank_out = tl.arange(0, RANKS)[None, :], tl.arange(0, RANKS_OUT)[None, :]
    small = tl.load(low + row * RANK + rank, mask=(row < end) & (rank < RANK), other=0)
    b += expert * 2 * INNER * RANK
    a += expert * RANK_OUT * INNER
    total = tl.zeros((ROWS, RANKS_OUT), tl.float32)
    for start in range(0, INNER, COLUMNS):
        line = start + tl.arange(0, COLUMNS)[:, None]
        column = start + tl.arange(0, COLUMNS)[None, :]
        here = (row < end) & (column < INNER)
        at = row * 2 * INNER + column
        for_gate = tl.load(b + line * RANK + rank, mask=(line < INNER) & (rank < RANK), other=0)
        for_up = tl.load(b + (INNER + line) * RANK + rank, mask=(line < INNER) & (rank < RANK), other=0)
        gate = tl.load(both + at, mask=here, other=0).to(tl.float32)
        up = tl.load(both + at + INNER, mask=here, other=0).to(tl.float32)
        gate += tl.dot(small, tl.trans(for_gate), input_precision="ieee")
        up += tl.dot(small, tl.trans(for_up), input_precision="ieee")
        tl.store(both + at, gate, mask=here)
        tl.store(both + at + INNER, up, mask=here)
        inner = (gate * _sigmoid(gate) * up * prob).to(out.dtype.element_ty)
        tl.store(out + row * INNER + column, inner, mask=here)
        factor = tl.load(a + rank_out * INNER + line, mask=(line < INNER) & (rank_out < RANK_OUT), other=0)
        total = tl.dot(inner, factor, total, input_precision="ieee")
    tl.store(low_out + row * RANK_OUT + rank_out, total, mask=(row < end) & (rank_out < RANK_OUT))


def activate(both: Tensor, low: Tensor, b: Tensor, a: Tensor, probs: Tensor, way: Order) -> tuple[Tensor, Tensor]:
    """Add low [R, r] times b [experts, 2 inner, r] to `both` [R, 2 inner] in place, and activate it.

    Returns silu(gate) * up * probs[order] [R, inner], and its product with a [experts, r', inner]: [R, r']. `probs`: flat.
    """
    rows, inner, rank, rank_out = len(both), both.shape[1] // 2, low.shape[1], a.shape[1]
    out, low_out = both.new_empty(rows, inner), both.new_empty(rows, rank_out)
    tile = TILES["activate"]
    _activate[_programs(way, tile)](
        both, low, b, a, probs, way.order, way.ends, out, low_out,
        INNER=inner, RANK=rank, RANK_OUT=rank_out, RANKS=_ranks(rank), RANKS_OUT=_ranks(rank_out), **_sizes(way, tile),
    )  # fmt: skip
    return out, low_out


@triton.jit
def _activate_backward(  # type: ignore[no-untyped-def]
    grad, low, a, both, b, probs, order, ends, d_both, out, d_probs, low_out,
    INNER: tl.constexpr, RANK: tl.constexpr, RANK_OUT: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, RANKS_OUT: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(ends, tl.program_id(0), ROWS, EXPERTS, PADDED)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS).to(tl.int64)
    slot = tl.load(order + row, mask=row < end, other=0)
    prob = tl.load(probs + slot).to(tl.float32)[:, None]
    flat, row = row, row[:, None]
    rank, rank_out = tl.arange(0, RANKS), tl.arange(0, RANKS_OUT)[None, :]
    small = tl.load(low + row * RANK + rank[None, :], mask=(row < end) & (rank[None, :] < RANK), other=0)
    a += expert * RANK * INNER
    b += expert * 2 * INNER * RANK_OUT
    total = tl.zeros((ROWS, RANKS_OUT), tl.float32)
    d_prob = tl.zeros((ROWS,), tl.float32)
    for start in range(0, INNER, COLUMNS):
        line = start + tl.arange(0, COLUMNS)[:, None]
        column = start + tl.arange(0, COLUMNS)[None, :]
        here = (row < end) & (column < INNER)
        at = row * 2 * INNER + column
        factor = tl.load(a + rank[:, None] * INNER + column, mask=(rank[:, None] < RANK) & (column < INNER), other=0)
        slope = tl.load(grad + row * INNER + column, mask=here, other=0).to(tl.float32)
        slope += tl.dot(small, factor, input_precision="ieee")
        gate = tl.load(both + at, mask=here, other=0).to(tl.float32)
        up = tl.load(both + at + INNER, mask=here, other=0).to(tl.float32)
        soft = _sigmoid(gate)
        inner = gate * soft * up
        d_prob += tl.sum(slope * inner, 1)
        tl.store(out + row * INNER + column, inner * prob, mask=here)
        slope *= prob
        d_gate = (slope * up * soft * (1 + gate * (1 - soft))).to(d_both.dtype.element_ty)
        d_up = (slope * gate * soft).to(d_both.dtype.element_ty)
        tl.store(d_both + at, d_gate, mask=here)
        tl.store(d_both + at + INNER, d_up, mask=here)
        there = (line < INNER) & (rank_out < RANK_OUT)
        total = tl.dot(
            d_gate, tl.load(b + line * RANK_OUT + rank_out, mask=there, other=0), total, input_precision="ieee"
        )
        of_up = tl.load(b + (INNER + line) * RANK_OUT + rank_out, mask=there, other=0)
        total = tl.dot(d_up, of_up, total, input_precision="ieee")
    tl.store(d_probs + slot, d_prob, mask=flat < end)
    tl.store(low_out + row * RANK_OUT + rank_out, total, mask=(row < end) & (rank_out < RANK_OUT))


def activate_backward(
    grad: Tensor, low: Tensor, a: Tensor, both: Tensor, b: Tensor, probs: Tensor, way: Order
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the backward of `activate`, whose first result has the gradient grad [R, inner] + low [R, r'] times a [experts,
    r', inner].

    Returns the gradients of `both` and of the flat `probs`, the first result again, and the gradient of `both` times b: [R, r].
    """
    rows, inner = grad.shape
    rank, rank_out = low.shape[1], b.shape[2]
    d_both, out, d_probs = torch.empty_like(both), torch.empty_like(grad), torch.empty_like(probs)
    low_out = grad.new_empty(rows, rank_out)
    tile = TILES["activate_backward"]
    _activate_backward[_programs(way, tile)](
        grad, low, a, both, b, probs, way.order, way.ends, d_both, out, d_probs, low_out,
        INNER=inner, RANK=rank, RANK_OUT=rank_out, RANKS=_ranks(rank), RANKS_OUT=_ranks(rank_out), **_sizes(way, tile),
    )  # fmt: skip
    return d_both, d_probs, out, low_out


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    thin, wide, order, ends, out, scale, by_expert, by_rank, by_column,
    WIDTH: tl.constexpr, PART: tl.constexpr, TOPK: tl.constexpr, ACROSS: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    expert, part = tl.program_id(0), tl.program_id(1)
    end = tl.load(ends + expert)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANKS)
    thin += part * RANK
    wide += part * PART
    total = tl.zeros((COLUMNS, RANKS), tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        source = row
        if TOPK > 0:
            source = tl.load(order + row, mask=row < end, other=0) // TOPK
        live = row[:, None] < end
        value = tl.load(wide + source[:, None] * WIDTH + column[None, :], mask=live & (column[None, :] < PART), other=0)
        small = tl.load(thin + row[:, None] * ACROSS + rank[None, :], mask=live & (rank[None, :] < RANK), other=0)
        total = tl.dot(tl.trans(value), small, total, input_precision="ieee")
    at = expert.to(tl.int64) * by_expert + (part * PART + column[:, None]) * by_column + rank[None, :] * by_rank
    tl.store(out + at, total * scale, mask=(column[:, None] < PART) & (rank[None, :] < RANK))


def _products(thin: Tensor, wide: Tensor, gathered: bool, way: Order, out: Tensor, scale: float, sizes: tuple[int, ...],
              strides: tuple[int, ...]) -> Tensor:  # fmt: skip
    """Fill out [experts, ...]: for each part of the wide columns and its ranks, the sum over an expert's rows of wide times
    thin.

    `gathered`: wide is [T, width], and its rows are wide[order // topk]. `sizes`: number of parts, ranks of each. `strides` of
    `out`: of experts, ranks, columns.
    """
    parts, rank = sizes
    width = wide.shape[1]
    part = width // parts
    tile = TILES["gradients"]
    columns = max(16, min(tile.columns, triton.next_power_of_2(part)))
    _gradient[(len(way.ends), parts, triton.cdiv(part, columns))](
        thin, wide, way.order, way.ends, out, scale, *strides,
        WIDTH=width, PART=part, TOPK=way.topk if gathered else 0, ACROSS=thin.shape[1], RANK=rank,
        ROWS=tile.rows, COLUMNS=columns, RANKS=_ranks(rank), num_warps=tile.warps,
    )  # fmt: skip
    return out


def gradients(
    pair: Pair, way: Order, x: tuple[Tensor, bool], low: Tensor, slope: tuple[Tensor, bool], d_low: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a linear's adapters, fp32: of `pair.a` and `pair.b`.

    `x`: the input; `low`: the input times A; `slope`: gradient of the output; `d_low`: that times B. The flag beside `x` and
    `slope` says whether they are by token, not by row.
    """
    parts, rank, width = pair.a.shape[1:]
    d_a, d_b = torch.empty_like(pair.a), torch.empty_like(pair.b)
    _products(d_low, *x, way, d_a, pair.scale, (1, parts * rank), (math.prod(pair.a.shape[1:]), width, 1))
    _products(low, *slope, way, d_b, 1.0, (parts, rank), (math.prod(pair.b.shape[1:]), 1, rank))
    return d_a, d_b


def _programs(way: Order, tile: Tile) -> tuple[int]:
    """Return the largest number of tiles that there may be, however the rows are shared among the experts."""
    return (triton.cdiv(len(way.order), tile.rows) + len(way.ends),)


def _sizes(way: Order, tile: Tile) -> dict[str, int]:
    experts = {"EXPERTS": len(way.ends), "PADDED": triton.next_power_of_2(len(way.ends))}
    return experts | {"ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps}


def _ranks(rank: int) -> int:
    """Return the padded rank: a tensor core's product has at least 16 numbers."""
    return max(16, triton.next_power_of_2(rank))
