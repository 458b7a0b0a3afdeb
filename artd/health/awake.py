"""A clock that stands still while the daemon does: what is measured by it did not run either while the daemon was stopped or starved.

Owner of: the time that counts so far. Invariants: between two looks at most `most_s` count, so it has to be looked at more often than that.
"""

from __future__ import annotations

from collections.abc import Callable


class Awake:
    """clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], most_s: float) -> None:
        self._clock = clock
        self._most_s = most_s
        self._looked = clock()
        self._seconds = 0.0

    def now(self) -> float:
        """Seconds since it was made in which the daemon was awake, as far as it can tell."""
        now = self._clock()
        self._seconds += min(max(0.0, now - self._looked), self._most_s)
        self._looked = now
        return self._seconds
