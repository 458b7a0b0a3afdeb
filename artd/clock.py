"""The daemon's only source of time. Wall time is for rows and people; durations and time-outs use the monotonic
clock."""

from __future__ import annotations

import time


class Clock:
    """Real time; tests pass their own."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic()
