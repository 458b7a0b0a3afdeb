"""Compares tensors that arrive in an engine with the committed weight table: by sha256, or by the 64-bit sum of a GPU's
trainer.

No tensor goes unchecked. It imports no vLLM.
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
"""Bytes of a GPU's tensors that are collected and summed together, because waiting for the GPU costs more than the sums."""


class WeightError(Exception):
    """Received weights are not those of the committed table, or do not cover the model."""


@dataclass(frozen=True)
class Entry:
    """One row of the weight table as JSON carries it. `known`: its sha256 in hex, or its sum64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    known: str | int

    def check_form(self, tensor: torch.Tensor) -> None:
        """Raise WeightError unless a tensor has this row's dtype and shape."""
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != (self.dtype, self.shape):
            raise WeightError(f"{self.name} is {found}, the weight table says {(self.dtype, self.shape)}")

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a contiguous tensor has this row's bytes. A sum is computed on the tensor's device, a sha256 on the
        CPU."""
        return sum_of(tensor) == self.known if isinstance(self.known, int) else sha256(tensor) == self.known


def entries(rows: list[list[Any]]) -> list[Entry]:
    """Decode [[name, dtype, shape, sha256 or sum64], ...]."""
    return [Entry(name, dtype, tuple(shape), known) for name, dtype, shape, known in rows]


def wrong_of(rows: Sequence[Entry], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of rows whose tensors have other bytes. All sums are made together, so a GPU is waited for once."""
    sums = iter(sums_of([tensor for row, tensor in zip(rows, tensors, strict=True) if isinstance(row.known, int)]))
    return [
        row.name
        for row, tensor in zip(rows, tensors, strict=True)
        if not (next(sums) == row.known if isinstance(row.known, int) else row.is_of(tensor))
    ]


class Hasher:
    """Checks tensors in a thread during the load (hashing releases the interpreter lock), those of a GPU many at once.

    It owns that thread, and the tensors that wait to be checked. Nobody may write to an added tensor before `finish`.
    """

    def __init__(self, together: Callable[[torch.Tensor], bool] = attrgetter("is_cuda")) -> None:
        """Start the thread. `together(tensor)`: whether a tensor is checked together with others; all such tensors are on one
        device."""
        self._together = together
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="artd-hash")
        self._pending: list[tuple[Entry, Future[bool]]] = []
        self._batch: list[tuple[Entry, torch.Tensor]] = []
        self._held = 0
        self._wrong: list[str] = []
        self.bytes = 0

    def add(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Add a contiguous tensor to be checked."""
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
        """Wait for all checks. Raises WeightError, which names the first tensor whose bytes are not the table's."""
        self._check()
        wrong = self._wrong + [entry.name for entry, right in self._pending if not right.result()]
        if wrong:
            raise WeightError(f"{len(wrong)} tensors arrived with other bytes than committed, the first is {wrong[0]}")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def sha256(tensor: torch.Tensor) -> str:
    """Return the hex digest of a contiguous tensor's bytes."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()
