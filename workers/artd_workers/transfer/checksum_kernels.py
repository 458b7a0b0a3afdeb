"""Checksums on a GPU, alone or fused with the copy that they check: `checksum.py` in Triton.

The kernels use integers only, so the sums equal the reference's bit for bit, in whatever order the blocks end. A
copying kernel hashes what it reads back from the memory that it has written.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .checksum import BLOCK, P1, P2, P3, WORD, Blocks

_STEP = 2048


@triton.jit
def _mix(words, at, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr):
    h = words.to(tl.uint64) ^ (at.to(tl.uint64) * P1)
    h = (h ^ (h >> 32)) * P2
    h = (h ^ (h >> 29)) * P3
    return h ^ (h >> 32)


@triton.jit(do_not_specialize=["skip"])
def _sum_blocks(
    anchor, offset, source, first, words, part, sums, skip, rows,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) + skip
    # With these hints (16 bytes) a thread loads two words at once.
    here = anchor + tl.multiple_of(tl.load(offset + block), ALIGNED)
    there = anchor + tl.multiple_of(tl.load(source + block), ALIGNED)
    count = tl.multiple_of(tl.load(words + block).to(tl.int32), ALIGNED)
    begin = tl.load(first + block) + 1
    total = tl.zeros([STEP], tl.uint64)
    for step in range(0, BLOCK, STEP):
        at = step + tl.arange(0, STEP)
        mask = at < count
        place = at
        if ROWS:
            number = tl.load(rows + 4 * block).to(tl.int32) + at
            width = tl.load(rows + 4 * block + 1).to(tl.int32)
            row, column = number // width, number % width
            place = row * tl.load(rows + 4 * block + 3) + column
            position = begin + row * tl.load(rows + 4 * block + 2) + column
        if COPY:
            tl.store(here + place, tl.load(there + place, mask=mask), mask=mask)
            tl.debug_barrier()  # without it the compiler may hash the registers, not the memory that it wrote
            word = tl.load(here + place, mask=mask, other=0, cache_modifier=".cg")
        else:
            word = tl.load(here + place, mask=mask, other=0)
        if not ROWS:
            position = begin + at
        total += tl.where(mask, _mix(word, position, P1, P2, P3), 0)
    tl.atomic_add(sums + tl.load(part + block), tl.sum(total, 0).to(tl.int64), sem="relaxed")


class Table:
    """Blocks whose addresses are offsets from a tensor of this device. A table owns those offsets."""

    def __init__(self, blocks: Blocks) -> None:
        self._ends, self._striped = blocks.ends, blocks.striped
        self._anchor = torch.zeros(2, dtype=torch.int64, device=blocks.device)
        at = self._anchor.data_ptr()
        there = np.where(blocks.other > 0, (blocks.other - at) // WORD, 0)
        count = len(blocks.address)
        # An even length, because Triton compiles again for a pointer that 16 does not divide.
        columns = np.zeros((5, count + count % 2), np.int64)
        columns[:, :count] = (blocks.address - at) // WORD, there, blocks.first, blocks.words, blocks.part
        # The source memory is not pinned, so torch waits for the copy, and other streams may read these tables.
        self._here, self._there, self._first, self._words, self._part = torch.from_numpy(columns).to(blocks.device)
        self._rows = None if blocks.rows is None else torch.from_numpy(blocks.rows).to(blocks.device)
        both = np.concatenate((blocks.address, blocks.other))
        whole = at % 16 == 0 and not (both % 16).any() and not (blocks.words % 2).any()
        self._aligned = 2 if whole else 1
        self._warm()

    def sum(self, sums: Tensor, spans: tuple[int, int], copy: bool = False) -> None:
        """Add the sums of spans i .. j - 1 to `sums` [parts] on the current stream. `copy`: first copy from the
        spans' other addresses.
        """
        begin, end = (0 if i == 0 else self._ends[i - 1] for i in spans)
        i, j = spans
        self._launch(begin, end - begin, self._words, self._part, sums, copy, self._striped[j] > self._striped[i])

    def _warm(self) -> None:
        """Compile the kernels now. Otherwise the first push would wait for that while its engine is paused."""
        words, part = (torch.zeros_like(one[:1]) for one in (self._words, self._part))
        sums = torch.zeros_like(self._anchor)
        for rows in (False,) if self._rows is None else (False, True):
            for copy in (False, True):
                self._launch(0, len(words), words, part, sums, copy, rows)

    def _launch(self, skip: int, count: int, words: Tensor, part: Tensor, sums: Tensor, copy: bool, rows: bool) -> None:
        """Run the kernel on `count` blocks after the first `skip`. `rows`: whether some of them are rows."""
        if count == 0:
            return
        # Pass whole tensors and an offset: slices would be compiled once per alignment of their first element.
        _sum_blocks[(count,)](
            self._anchor, self._here, self._there, self._first, words, part, sums, skip,
            self._words if self._rows is None else self._rows,
            P1, P2, P3, BLOCK, _STEP, copy, self._aligned, rows, num_warps=8,
        )  # fmt: skip
