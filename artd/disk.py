"""Free space: below `limits.min_free_mib` nothing more is admitted; it heals by itself when space returns.

Owner of: the last reading. Invariants: one statvfs a second at most, however many requests come.
"""

from __future__ import annotations

import os
from pathlib import Path

from .clock import Clock
from .errors import Busy

PERIOD_S = 1.0


class Disk:
    """Watches the file system of the data folder."""

    def __init__(self, root: Path, min_free: int, clock: Clock) -> None:
        self._root = root
        self._min_free = min_free
        self._clock = clock
        self._read_at = float("-inf")
        self._free = 0

    def free(self) -> int:
        """Bytes that this user may still write."""
        now = self._clock.monotonic()
        if now - self._read_at >= PERIOD_S:
            found = os.statvfs(self._root)
            self._read_at, self._free = now, found.f_bavail * found.f_frsize
        return self._free

    def require(self) -> None:
        """Errors: Busy when there is too little."""
        if (free := self.free()) < self._min_free:
            raise Busy(
                f"only {free >> 20} MiB are free on {self._root}, {self._min_free >> 20} MiB are required "
                "(limits.min_free_mib): free space; artd goes on by itself",
                retry_after_s=5.0,
            )
