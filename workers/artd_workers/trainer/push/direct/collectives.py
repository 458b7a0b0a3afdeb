"""What processes that each give a part of one model say to each other while none of them works on a push.

Purpose: `Collectives` is what `..ranks.Ranks` does for this folder, and `SINGLE_RANK` for a process that has all of the model.
Owner of: no state. Invariants: every process calls the same, in the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """first: this is the process that leads."""

    @property
    def first(self) -> bool: ...

    def share_errors(self) -> AbstractContextManager[None]:
        """What each does by itself: when it fails on one, all raise."""

    def broadcast(self, value: int) -> int:
        """The first one's."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """What each of them says."""

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """int64 on the CPU, of one shape -> their sum modulo 2^64."""


class SingleRank:
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
