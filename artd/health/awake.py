"""Provides a clock that stops while the daemon is stopped or starved, for durations that should not include that time.

Owns the seconds counted so far. It counts at most `most_s` between two calls of `now`, so it must be called more often
than that.
"""

from __future__ import annotations

from collections.abc import Callable


class Awake:
    """Counts the seconds in which the daemon was awake. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float], most_s: float) -> None:
        self._clock = clock
        self._most_s = most_s
        self._looked = clock()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds since this clock was made in which the daemon was awake, as far as it can tell."""
        now = self._clock()
        self._seconds += min(max(0.0, now - self._looked), self._most_s)
        self._looked = now
        return self._seconds
