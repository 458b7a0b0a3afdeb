"""Tensors on their way into an engine against the committed weight table: sha256, or the 64-bit sum of a GPU's trainer.

Owner of: the hashing thread of a load. Invariant: no tensor goes unchecked.
Imports no vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..direct.checksum import sum_of
from ..direct.sums import sums_of


class WeightError(Exception):
    """Received weights are not those of the committed table, or do not cover the model."""


@dataclass(frozen=True)
class Entry:
    """One row of the weight table as it crosses JSON. known: its sha256 in hex, or its sum64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    known: str | int

    def check_form(self, tensor: torch.Tensor) -> None:
        """Raises WeightError unless a tensor has this row's dtype and shape."""
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != (self.dtype, self.shape):
            raise WeightError(f"{self.name} is {found}, the weight table says {(self.dtype, self.shape)}")

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a contiguous tensor has this row's bytes. A sum is made where the tensor lies, a sha256 on the CPU."""
        return sum_of(tensor) == self.known if isinstance(self.known, int) else sha256(tensor) == self.known


def entries(rows: list[list[Any]]) -> list[Entry]:
    """Decode [[name, dtype, shape, sha256 or sum64], ...]."""
    return [Entry(name, dtype, tuple(shape), known) for name, dtype, shape, known in rows]


def first_wrong(rows: Sequence[Entry], tensors: Sequence[torch.Tensor]) -> str:
    """Name of the first row whose tensor has other bytes, "" = none. All sums are made at once: a GPU is waited for once."""
    sums = iter(sums_of([tensor for row, tensor in zip(rows, tensors, strict=True) if isinstance(row.known, int)]))
    for row, tensor in zip(rows, tensors, strict=True):
        if not (next(sums) == row.known if isinstance(row.known, int) else row.is_of(tensor)):
            return row.name
    return ""


class Hasher:
    """Checks tensors in a thread beside the load (hashing releases the interpreter lock), those of a GPU at once and there;
    owns that thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="artd-hash")
        self._pending: list[tuple[Entry, Future[bool]]] = []
        self._wrong: list[str] = []
        self.bytes = 0

    def add(self, entry: Entry, tensor: torch.Tensor) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        if tensor.is_cuda:  # its memory is used again for the next tensor: nothing may look at it later
            if not entry.is_of(tensor):
                self._wrong.append(entry.name)
        else:
            self._pending.append((entry, self._pool.submit(entry.is_of, tensor)))

    def finish(self) -> None:
        """Raise WeightError, naming the first tensor whose bytes are not the table's."""
        wrong = self._wrong + [entry.name for entry, right in self._pending if not right.result()]
        if wrong:
            raise WeightError(f"{len(wrong)} tensors arrived with other bytes than committed, the first is {wrong[0]}")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def sha256(tensor: torch.Tensor) -> str:
    """Hex digest of a contiguous tensor's bytes."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()
