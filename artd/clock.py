"""Provides the daemon's time. Rows and texts use wall time; durations and time-outs use the monotonic clock."""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks; tests pass their own."""

    def now_ms(self) -> int:
        """Return the milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()
