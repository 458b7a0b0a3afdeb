"""Keeps leases: artd kills a process that is silent for too long, and requeues its work only after its death is proven.

Owns how long each holder has been silent. The caller decides which processes hold a lease and what renews it: any
message of a ready worker (a worker that still starts has its start time-out instead), or progress of the trainer's job.
Only time in which the daemon itself was awake counts, because a daemon that was stopped or starved has not read its
workers' messages. An order names the silent spawn, so it never hits the process after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import anyio

from artd.clock import Clock

LOOKS = 5
"""How often during one lease the daemon looks at its holders; they send at least as many heartbeats."""
LONGEST_LOOK_S = 60.0
LONGEST_BEAT_S = 1.0


class Holder(NamedTuple):
    """A process that must show signs of life."""

    name: str
    spawn: int


def heartbeat_s(lease_s: float) -> float:
    """Return the seconds between two heartbeats of a worker."""
    return min(LONGEST_BEAT_S, lease_s / LOOKS)


class Leases:
    """The leases of some processes. A process may be silent for `lease_s` seconds; 0 means no limit. `holders` returns the processes
    that hold a lease now. `end(name, seconds, spawn)` ends a process that was silent for `seconds`."""

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

    def renew(self, name: str, spawn: int) -> None:
        """Start the silence of a process anew. The next look adds the time since the last look, also the part before this call,
        so subtract that part here."""
        self._silent[Holder(name, spawn)] = -self._awake_s()

    def look(self) -> None:
        """Add the time since the last look to each silence, and end the processes that were silent for too long."""
        passed = self._awake_s()
        self._looked = self._clock.monotonic()
        self._silent = {holder: self._silent.get(holder, -passed) + passed for holder in self._holders()}
        for holder, seconds in self._silent.items():
            if seconds > self._lease_s:
                self._silent[holder] = 0.0
                self._end(holder.name, seconds, holder.spawn)

    def _awake_s(self) -> float:
        """Return the seconds since the last look in which the daemon was awake, as far as it can tell."""
        return min(self._clock.monotonic() - self._looked, 2 * self._look_s)
