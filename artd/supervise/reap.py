"""At boot: end what older boots of this instance left behind, and nothing else.

Owner of: no state. Invariants: a process is touched only when it is the recorded (boot id, pid, start ticks), or carries
this instance's tag with an older boot, or descends from (or shares the session of) such a one; never when its owner (by
daemon.json, or by its own ARTD_OWNER tag) lives, so a copied data folder cannot end the original's workers; the time
is bounded, and what does not die is reported as broken(pid, state).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from . import procfs
from .procfs import Identity, Stat

REAP_S = 5.0
Key = tuple[int, int]
"""(pid, start ticks) of a process of this boot of the machine."""


@dataclass(frozen=True)
class Recorded:
    """A row of table `process`: the guardian that a worker had. session: the session that it led, if it was one."""

    name: str
    boot_id: str
    pid: int
    ticks: int
    session: int | None


@dataclass(frozen=True)
class Leftover:
    """A process of an older boot. name: its worker; state: of /proc/PID/stat, when last seen."""

    name: str
    pid: int
    ticks: int
    state: str

    @property
    def key(self) -> Key:
        return self.pid, self.ticks

    def __str__(self) -> str:
        return f"worker {self.name}: broken(pid {self.pid}, state {self.state})"


@dataclass(frozen=True)
class Reaped:
    """ended: proven dead; broken: still there after the bound. Nothing is looked for when the owner lives."""

    ended: tuple[Leftover, ...] = ()
    broken: tuple[Leftover, ...] = ()


async def reap(
    instance: str, boot: int, recorded: Iterable[Recorded], owner: Identity | None, within_s: float = REAP_S
) -> Reaped:
    """End the leftovers of boots of `instance` older than `boot`. owner: the daemon that daemon.json named before
    this one. Wait at most `within_s` seconds for their death."""
    if owner is not None and owner.pid != os.getpid() and procfs.alive(owner):
        return Reaped()
    rows = tuple(recorded)
    known: dict[Key, Leftover] = {}
    deadline = time.monotonic() + within_s
    # Frozen first: one that forks while it is looked for could have a child that carries no tag.
    while new := [left for left in find(instance, boot, rows, known) if left.key not in known]:
        known |= {left.key: left for left in new}
        _strike(new, signal.SIGSTOP)
        if time.monotonic() > deadline:
            break
    while living := find(instance, boot, rows, known):
        known |= {left.key: left for left in living}
        _strike(living, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    stuck = {left.key for left in living}
    ended = tuple(left for key, left in known.items() if key not in stuck)
    return Reaped(ended=ended, broken=tuple(living))


def strike_again(leftovers: Iterable[Leftover]) -> tuple[Leftover, ...]:
    """Those that live still, as of now; each has got another SIGKILL."""
    stats = [(left, procfs.read_stat(left.pid)) for left in leftovers]
    living = tuple(
        replace(left, state=stat.state)
        for left, stat in stats
        if stat is not None and stat.ticks == left.ticks and not stat.dead
    )
    _strike(living, signal.SIGKILL)
    return living


def find(
    instance: str, boot: int, recorded: Iterable[Recorded], known: Mapping[Key, Leftover] = MappingProxyType({})
) -> list[Leftover]:
    """Living leftovers now. known: those found before; they and what descends from them belong to the result."""
    stats = {stat.pid: stat for stat in procfs.all_stats()}
    names = {pid: left.name for (pid, ticks), left in known.items() if pid in stats and stats[pid].ticks == ticks}
    names |= {stat.pid: name for stat in stats.values() if (name := _tagged(stat, instance, boot))}
    machine = procfs.boot_id()
    for row in recorded:
        stat = stats.get(row.pid)
        if (
            stat is None
            or row.boot_id != machine
            or stat.ticks != row.ticks
            or _owner_lives(procfs.environment(row.pid))
        ):
            continue
        names[row.pid] = row.name
        # Its leader is still in the table, so the session's number cannot belong to a stranger.
        names |= {other.pid: row.name for other in stats.values() if other.session == row.session == row.pid}
    for root, name in list(names.items()):
        for stat in procfs.descendants([root], stats.values()):
            names.setdefault(stat.pid, name)
    spared = _lineage(stats)
    return [
        Leftover(name, pid, stats[pid].ticks, stats[pid].state)
        for pid, name in names.items()
        if pid not in spared and not stats[pid].dead
    ]


def _strike(leftovers: Iterable[Leftover], number: int) -> None:
    procfs.strike((Stat(left.pid, 0, 0, left.state, left.ticks) for left in leftovers), number)


def _tagged(stat: Stat, instance: str, boot: int) -> str:
    """Name of the worker when the process is of an older boot of this instance and its owner is dead, else ""."""
    env = procfs.environment(stat.pid)
    number = env.get("ARTD_BOOT", "")
    if env.get("ARTD_INSTANCE") != instance or not number.isdecimal() or int(number) >= boot or _owner_lives(env):
        return ""
    return env.get("ARTD_WORKER", "?")


def _owner_lives(env: dict[str, str]) -> bool:
    pid, _, ticks = env.get("ARTD_OWNER", "").partition(":")
    return pid.isdecimal() and ticks.isdecimal() and procfs.alive(Identity(procfs.boot_id(), int(pid), int(ticks)))


def _lineage(stats: dict[int, Stat]) -> set[int]:
    """This process and its ancestors: never a leftover, whatever environment they were started in."""
    found: set[int] = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        stat = stats.get(pid)
        pid = stat.ppid if stat is not None else 0
    return found
