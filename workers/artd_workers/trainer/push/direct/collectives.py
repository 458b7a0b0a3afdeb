"""What processes that each give a part of one model say to each other while none of them works on a push.

Purpose: `Together` is what `..ranks.Ranks` does for this folder, and `ONE` for a process that has all of the model.
Owner of: no state. Invariants: every process calls the same, in the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class Together(Protocol):
    """first: this is the process that leads."""

    @property
    def first(self) -> bool: ...

    def agreed(self) -> AbstractContextManager[None]:
        """What each does by itself: when it fails on one, all raise."""

    def told(self, value: int) -> int:
        """The first one's."""

    def shared(self, data: bytes) -> list[bytes]:
        """What each of them says."""

    def added(self, numbers: Tensor) -> Tensor:
        """int64 on the CPU, of one shape -> their sum modulo 2^64."""


class One:
    first = True

    def agreed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def told(self, value: int) -> int:
        return value

    def shared(self, data: bytes) -> list[bytes]:
        return [data]

    def added(self, numbers: Tensor) -> Tensor:
        return numbers


ONE = One()
