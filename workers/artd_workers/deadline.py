"""Deadlines that several calls share."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S, LONGEST_S = 0.001, 86400.0


class Deadline:
    """A point in time that several calls share. `left` is in seconds and never below 1 ms, because 0 would mean "never"."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(LEAST_S, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def longest(self) -> float:
        """Seconds after which the deadline has passed for certain."""
        return self.left


class Patient(Deadline):
    """A deadline that moves while there is progress: each new value of `mark()` starts its time again."""

    def __init__(self, seconds: float, mark: Callable[[], object]) -> None:
        super().__init__(seconds)
        self._mark = mark
        self._seen = mark()

    @property
    def left(self) -> float:
        if (now := self._mark()) != self._seen:
            self._seen, self._end = now, time.monotonic() + self.seconds
        return super().left

    @property
    def passed(self) -> bool:
        return self.left <= LEAST_S and super().passed

    @property
    def longest(self) -> float:
        return LONGEST_S
