"""`transfer.merge.merge` as a GPU kernel that makes all rows of a slot in one launch.

A filler owns a table of the rows of every slot, on the device. The kernel makes the same bits as `merge`: it adds the
products of rank 0, 1, 2 ... in that order in fp32 without fused multiply-add, scales the sum, adds the weight, and
rounds once. It runs no Python per expert and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from artd_workers.models.codec import peft_names

from .schedule import Fill

_FIELDS = 6
_NONE = -8


@dataclass(frozen=True)
class Tile:
    """What one program of the kernel makes: `rows` rows of `columns` numbers, `together` rows at a time, with `warps`
    warps.
    """

    rows: int
    together: int
    columns: int
    warps: int

    @classmethod
    def of(cls, rank: int) -> Tile:
        """Return the tile for adapters of this rank.

        A thread holds about 128 numbers of A, as many as its registers take, and one number of a row. More numbers of
        a row would leave fewer programs to hide each other's waits.
        """
        return cls(64, 1, min(256, max(32, 4096 // triton.next_power_of_2(rank))), 1)


@triton.jit
def _fill(
    weights, adapter, out, table, scale,
    RANK: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0) * FIELDS
    rows = tl.load(entry + 4)
    # With these hints (8 elements) a thread loads several elements at once.
    width = tl.multiple_of(tl.load(entry + 5), ALIGNED)
    first = tl.program_id(1) * COLUMNS
    if first >= width:
        return
    weight_at = tl.multiple_of(tl.load(entry), ALIGNED)
    out_at = tl.multiple_of(tl.load(entry + 1), ALIGNED)
    a_at = tl.multiple_of(tl.load(entry + 2), ALIGNED)
    b_at = tl.load(entry + 3)
    column = first + tl.arange(0, COLUMNS)
    inside = column < width
    # A's columns stay in registers for all rows. B is read one number at a time, the same for all threads.
    a = ()
    for rank in tl.static_range(RANK):
        a += (tl.load(adapter + a_at + rank * width + column, mask=inside & (a_at >= 0), other=0),)  # type: ignore[assignment]
    for row in range(0, rows, TOGETHER):
        weight = ()
        for i in tl.static_range(TOGETHER):
            here = inside & (row + i < rows)
            weight += (tl.load(weights + weight_at + (row + i) * width + column, mask=here, other=0),)  # type: ignore[assignment]
        for i in tl.static_range(TOGETHER):
            merged = weight[i].to(tl.float32)  # type: ignore[var-annotated]
            if a_at >= 0:
                b = adapter + b_at + tl.minimum(row + i, rows - 1) * RANK
                total = tl.load(b) * a[0]
                for rank in tl.static_range(1, RANK):
                    total = total + tl.load(b + rank) * a[rank]
                merged = total * scale + merged
            here = inside & (row + i < rows)
            tl.store(out + out_at + (row + i) * width + column, merged.to(out.dtype.element_ty), mask=here)


class CudaFiller:
    """Fills slots with the kernel. `adapter` has views of `flat` (fp32) by PEFT name. `tile` replaces the rank's tile,
    for measurements."""

    def __init__(
        self, slots: Sequence[Sequence[Fill]], weights: Sequence[Tensor], parts: Sequence[str],
        adapter: Mapping[str, Tensor], flat: Tensor, scale: float, tile: Tile | None = None,
    ) -> None:  # fmt: skip
        self._flat, self._scale = flat, scale
        self._rank = next(iter(adapter.values())).shape[0] if adapter else 1
        self._tile = tile or Tile.of(self._rank)
        made = [one.piece.source for fills in slots for one in fills]
        self._anchor = torch.empty(8, dtype=weights[made[0]].dtype, device=flat.device) if made else flat
        lines: list[tuple[int, ...]] = []
        self._slots: list[tuple[int, int, int]] = []
        self._aligned = 8
        for fills in slots:
            begin = len(lines)
            for one in fills:
                lines += self._lines(one, weights[one.piece.source], parts[one.piece.part], adapter)
            widest = max((line[5] for line in lines[begin:]), default=0)
            self._slots.append((begin, len(lines), widest))
        self._table = torch.tensor(lines, dtype=torch.int64).reshape(-1, _FIELDS)
        if bool((self._table[:, [0, 1, 2, 5]] % 8).any()) or self._anchor.data_ptr() % 16 or flat.data_ptr() % 16:
            self._aligned = 1
        self._table = self._table.to(flat.device)

    def _lines(self, one: Fill, weight: Tensor, part: str, adapter: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
        """Return (weight, out, A or _NONE, B, rows, width) of each tile; the first four are offsets in elements."""
        piece, width, rank = one.piece, weight.shape[-1], self._rank
        at = (weight.data_ptr() - self._anchor.data_ptr()) // weight.element_size() + piece.begin
        name_a, name_b = peft_names(part)
        a, b = _NONE, 0
        if name_a in adapter:
            a, b = self._offset(adapter[name_a]), self._offset(adapter[name_b][piece.own // width :])
        return [
            (
                at + skip * width,
                one.at + skip * width,
                a,
                b + skip * rank,
                min(self._tile.rows, piece.count // width - skip),
                width,
            )
            for skip in range(0, piece.count // width, self._tile.rows)
        ]

    def _offset(self, tensor: Tensor) -> int:
        return (tensor.data_ptr() - self._flat.data_ptr()) // self._flat.element_size()

    def fill(self, slot: int, buffer: Tensor, queue: Any) -> None:
        begin, end, widest = self._slots[slot]
        tile = self._tile
        with torch.cuda.stream(queue.stream):
            # A fused multiply-add would round once where `merge` rounds twice.
            _fill[(end - begin, triton.cdiv(widest, tile.columns))](
                self._anchor, self._flat, buffer, self._table[begin:end], self._scale,
                self._rank, tile.together, tile.columns, _FIELDS, self._aligned, num_warps=tile.warps,
                enable_fp_fusion=False,
            )  # fmt: skip
