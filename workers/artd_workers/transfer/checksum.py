"""Position-dependent 64-bit checksums of weights, defined once and computed where the weights are.

The checksum of a tensor is the sum modulo 2^64 of mix(w, i) over its little-endian 64-bit words w at positions i = 0,
1, ..., where mix(w, i) is: h = w xor (i + 1) P1; h = (h xor h >> 32) P2; h = (h xor h >> 29) P3; h = h xor h >> 32.
For a fixed position mix is a bijection, so one changed word always changes the sum. Words that change together, or
change places, are found as by a hash. The second multiplication is there for changes of top bits alone, such as the
signs of all fp32 numbers. Because it is a sum, a tensor may be summed in pieces, in any order and on any device. The
result is a signed integer.

`sum_of` is the reference; `checksum_kernels.py` computes the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

P1 = 0x9E3779B97F4A7C15
P2 = 0xD6E8FEB86659FD93
P3 = 0xFF51AFD7ED558CCD
WORD = 8
BLOCK = 16384
"""Words that one block of the GPU kernel sums."""
_CHUNK = 1 << 20


def to_signed(value: int) -> int:
    """Return the low 64 bits of `value` as a signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def mix(words: Tensor, first: int) -> Tensor:
    """Return the hashes of int64 words [..., n] at positions first, first + 1, ..."""
    at = torch.arange(first + 1, first + 1 + words.shape[-1], dtype=torch.int64, device=words.device)
    h = words ^ (at * to_signed(P1))
    h = (h ^ ((h >> 32) & 0xFFFFFFFF)) * to_signed(P2)
    h = (h ^ ((h >> 29) & ((1 << 35) - 1))) * to_signed(P3)
    return h ^ ((h >> 32) & 0xFFFFFFFF)


def sum_of(tensor: Tensor, first: int = 0) -> int:
    """Return the checksum of a contiguous tensor whose bytes are a whole number of words. `first`: position of its
    first word.
    """
    words = tensor.reshape(-1).view(torch.uint8).view(torch.int64)
    total = 0
    for at in range(0, len(words), _CHUNK):
        total += int(mix(words[at : at + _CHUNK], first + at).sum())
    return to_signed(total)


def sums_of_stacked(stacked: Tensor) -> Tensor:
    """Return the checksum of each of the stacked tensors [n, ...], int64 [n] on their device, computed in one pass. A
    tensor that is not a whole number of words is summed as if zero bytes followed it.
    """
    raw = stacked.reshape(len(stacked), -1).contiguous().view(torch.uint8)
    words = functional.pad(raw, (0, -raw.shape[1] % WORD)).view(torch.int64)
    total = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    step = max(1, _CHUNK // max(1, len(words)))
    for at in range(0, words.shape[1], step):
        total += mix(words[:, at : at + step], at).sum(1)
    return total


@dataclass(frozen=True)
class Span:
    """Words of one tensor at one place in memory.

    - `address`: in bytes.
    - `first`: the position of the first word in its tensor.
    - `words`: the number of words.
    - `part`: the tensor whose sum they belong to.
    - `other`: a second address with the same layout, from which they are copied (0: none).
    - `width`: 0 for contiguous words at consecutive positions; otherwise the span has rows of `width` words, and each
      row's positions start `pitch` words
      after those of the row before.
    - `step`: the same distance in memory; 0 means that the rows are contiguous there.
    """

    address: int
    first: int
    words: int
    part: int
    other: int = 0
    width: int = 0
    pitch: int = 0
    step: int = 0


Column = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """Spans cut into blocks for the GPU kernel: int64 [blocks] columns in the host's memory.

    The blocks of span i are ends[i - 1] .. ends[i]. `striped` says how many of the first i spans have rows, [spans +
    1]. `rows` is None if no span has rows, else int64 [blocks, 4]: the number of the span's words in blocks before this
    one, width, pitch, step. A block of rows has its span's address and first position.
    """

    device: torch.device
    address: Column
    other: Column
    first: Column
    words: Column
    part: Column
    ends: tuple[int, ...]
    striped: tuple[int, ...]
    rows: Column | None

    @classmethod
    def cut(cls, spans: Sequence[Span], device: str | torch.device, size: int = BLOCK) -> Blocks:
        """Cut spans into blocks of at most `size` words.

        This uses numpy: torch would run each line in all of its threads, which costs milliseconds while others use
        the cores.
        """
        columns = [(s.address, s.other, s.first, s.words, s.part, s.width, s.pitch, s.step or s.width) for s in spans]
        table = np.array(columns, dtype=np.int64).reshape(-1, 8).T
        counts = (table[3] + size - 1) // size
        ends = counts.cumsum()
        address, other, first, words, part, width, pitch, step = np.repeat(table, counts, axis=1)
        before = (np.arange(len(address)) - np.repeat(ends - counts, counts)) * size
        skip, rows = before, None
        striped = tuple(accumulate((s.width > 0 for s in spans), initial=0))
        if striped[-1]:
            skip = np.where(width > 0, 0, before)
            # A contiguous span is a single row, however long.
            lines = (np.where(width > 0, column, size) for column in (width, pitch, step))
            rows = np.stack([before - skip, *lines], axis=1)
        return cls(
            torch.device(device), address + skip * WORD, np.where(other > 0, other + skip * WORD, 0), first + skip,
            np.minimum(words - before, size), part, tuple(ends.tolist()), striped, rows,
        )  # fmt: skip


def wrong_parts(found: Tensor, wanted: Tensor, parts: Sequence[str]) -> list[str]:
    """Return the names of the parts whose sums [parts] differ."""
    return [parts[i] for i in (found != wanted).nonzero().flatten().tolist()]


def expected_sums(parts: Iterable[str], sums: dict[str, int]) -> Tensor:
    """Return the manifest's sums in the order of `parts`. Raises KeyError for a part without a sum."""
    return torch.tensor([sums[part] for part in parts], dtype=torch.int64)
