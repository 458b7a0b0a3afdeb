"""Leases: a process of which too long nothing was heard is ended; its work goes back only when its death is proven.

Owner of: how long each holder has been silent. Who holds one and what is heard is the maker's to say: any message of a worker
that is ready (one that still starts has its start time-out instead), or progress of the trainer's job. Invariants: only time
in which the daemon itself was awake counts, because one that was stopped or starved finds its workers' messages unread; an
order names the spawn that was silent, so it never meets the process after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import anyio

from artd.clock import Clock

LOOKS = 5
"""How often in a lease its holders are looked at, and how often they send a heartbeat at least."""
LONGEST_LOOK_S = 60.0
LONGEST_BEAT_S = 1.0


class Holder(NamedTuple):
    """A process that must be heard of."""

    name: str
    spawn: int


def heartbeat_s(lease_s: float) -> float:
    """How often a worker sends its heartbeat, in seconds."""
    return min(LONGEST_BEAT_S, lease_s / LOOKS)


class Leases:
    """lease_s: seconds of silence that are allowed, 0: any; holders: those who must be heard of now; end(name, seconds, spawn):
    ends that process, which was silent for so long."""

    def __init__(
        self,
        clock: Clock,
        lease_s: float,
        holders: Callable[[], Iterable[Holder]],
        end: Callable[[str, float, int], None],
    ) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._holders = holders
        self._end = end
        self._look_s = min(lease_s / LOOKS, LONGEST_LOOK_S)
        self._looked = clock.monotonic()
        self._silent: dict[Holder, float] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while self._lease_s:
            await anyio.sleep(self._look_s)
            self.look()

    def heard(self, name: str, spawn: int) -> None:
        """Something came of that process now; the next look adds what has passed since the last one, also before it came."""
        self._silent[Holder(name, spawn)] = -self._passed()

    def look(self) -> None:
        """Count the silence since the last look, and end those for whom it is too long."""
        passed = self._passed()
        self._looked = self._clock.monotonic()
        self._silent = {holder: self._silent.get(holder, -passed) + passed for holder in self._holders()}
        for holder, seconds in self._silent.items():
            if seconds > self._lease_s:
                self._silent[holder] = 0.0
                self._end(holder.name, seconds, holder.spawn)

    def _passed(self) -> float:
        """Seconds since the last look in which the daemon was awake, as far as it can tell."""
        return min(self._clock.monotonic() - self._looked, 2 * self._look_s)
