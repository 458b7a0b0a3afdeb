"""The collectives that a direct push needs while no push is under way.

`Collectives` is the part of `parallel.ranks.Ranks` that this folder uses; `SINGLE_RANK` implements it for one process
with the whole model. Every process calls the same collectives in the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The collectives of the processes that each hold a part of one model."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""

    def share_errors(self) -> AbstractContextManager[None]:
        """Run a block that can fail on one rank alone; when it fails on one, all raise."""

    def broadcast(self, value: int) -> int:
        """Return rank 0's value on every rank."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank."""

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Return the sum modulo 2^64 of int64 tensors on the CPU, which have the same shape on all ranks."""


class SingleRank:
    """The collectives of a single process."""

    first = True

    def share_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def broadcast(self, value: int) -> int:
        return value

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def all_reduce(self, numbers: Tensor) -> Tensor:
        return numbers


SINGLE_RANK = SingleRank()
