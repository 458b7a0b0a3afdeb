"""Tensors on their way into an engine against the committed weight table: sha256, or the 64-bit sum of a GPU's trainer.

Owner of: the hashing thread of a load. Invariant: no tensor goes unchecked.
Imports no vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from artd_workers.transfer.checksum import sum_of
from artd_workers.transfer.sums import sums_of

BATCH = 256 << 20
"""Bytes of a GPU's tensors that are kept until they are summed together: waiting for it costs more than the sums."""


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


def wrong_of(rows: Sequence[Entry], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Names of the rows whose tensors have other bytes. All sums are made at once: a GPU is waited for once."""
    sums = iter(sums_of([tensor for row, tensor in zip(rows, tensors, strict=True) if isinstance(row.known, int)]))
    return [
        row.name
        for row, tensor in zip(rows, tensors, strict=True)
        if not (next(sums) == row.known if isinstance(row.known, int) else row.is_of(tensor))
    ]


class Hasher:
    """Checks tensors in a thread beside the load (hashing releases the interpreter lock), those of a GPU there, many at once;
    owns that thread, and the tensors that wait to be checked. Nobody may write to one that was added before `finish`."""

    def __init__(self, together: Callable[[torch.Tensor], bool] = attrgetter("is_cuda")) -> None:
        """together: which tensors are checked many at once; they are of one device."""
        self._together = together
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="artd-hash")
        self._pending: list[tuple[Entry, Future[bool]]] = []
        self._batch: list[tuple[Entry, torch.Tensor]] = []
        self._held = 0
        self._wrong: list[str] = []
        self.bytes = 0

    def add(self, entry: Entry, tensor: torch.Tensor) -> None:
        """tensor: contiguous."""
        size = tensor.numel() * tensor.element_size()
        self.bytes += size
        if not self._together(tensor):
            self._pending.append((entry, self._pool.submit(entry.is_of, tensor)))
            return
        self._batch.append((entry, tensor))
        self._held += size
        if self._held >= BATCH:
            self._check()

    def _check(self) -> None:
        rows, tensors = [entry for entry, _ in self._batch], [tensor for _, tensor in self._batch]
        self._wrong += wrong_of(rows, tensors)
        self._batch, self._held = [], 0

    def finish(self) -> None:
        """Raise WeightError, naming the first tensor whose bytes are not the table's."""
        self._check()
        wrong = self._wrong + [entry.name for entry, right in self._pending if not right.result()]
        if wrong:
            raise WeightError(f"{len(wrong)} tensors arrived with other bytes than committed, the first is {wrong[0]}")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def sha256(tensor: torch.Tensor) -> str:
    """Hex digest of a contiguous tensor's bytes."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()
