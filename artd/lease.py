"""Leases: a worker that was silent for too long is ended; its work goes back only when its death is proven.

Owner of: how long each worker has been silent. Invariants: a worker that still starts has its start time-out instead;
only time in which the daemon itself was awake counts, because one that was stopped or starved finds its workers'
heartbeats unread; an order names the spawn that was silent, so it never meets the process after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import anyio

from .clock import Clock

LOOKS = 5
"""How often in a lease its holders are looked at, and how often they send a heartbeat at least."""
LONGEST_BEAT_S = 1.0


class Holder(NamedTuple):
    """A process that owes heartbeats."""

    name: str
    spawn: int


def heartbeat_s(lease_s: float) -> float:
    """How often a worker sends its heartbeat, in seconds."""
    return min(LONGEST_BEAT_S, lease_s / LOOKS)


class Leases:
    """lease_s: seconds of silence that are allowed; holders: those who owe heartbeats now; kill(name, reason, spawn): ends
    that process."""

    def __init__(
        self,
        clock: Clock,
        lease_s: float,
        holders: Callable[[], Iterable[Holder]],
        kill: Callable[[str, str, int], None],
    ) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._holders = holders
        self._kill = kill
        self._looked = clock.monotonic()
        self._silent: dict[Holder, float] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await anyio.sleep(self._lease_s / LOOKS)
            self.look()

    def heard(self, name: str, spawn: int) -> None:
        """A message of that process came."""
        self._silent[Holder(name, spawn)] = 0.0

    def look(self) -> None:
        """Count the silence since the last look, and end those for whom it is too long."""
        now = self._clock.monotonic()
        passed = min(now - self._looked, 2 * self._lease_s / LOOKS)
        self._looked = now
        self._silent = {holder: self._silent.get(holder, -passed) + passed for holder in self._holders()}
        for holder, seconds in self._silent.items():
            if seconds > self._lease_s:
                self._silent[holder] = 0.0
                self._kill(holder.name, f"it was silent for {seconds:.1f} s (limits.lease_s)", holder.spawn)
