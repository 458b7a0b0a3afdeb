"""Ends, at boot, the processes that older boots of this instance left behind, and no others.

It signals a process only if that is the recorded (boot id, pid, start ticks), or has this instance's tag with an older
boot, or descends from (or shares the session of) such a process. It never signals a process whose owner (by
daemon.json, or by its own ARTD_OWNER tag) lives, so a copied data folder cannot end the original's workers. The time is
bounded; it reports a process that does not die as broken(pid, state).
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
    """A row of table `process`: the guardian of a worker. `session` is the session that it led, None if it led none."""

    name: str
    boot_id: str
    pid: int
    ticks: int
    session: int | None


@dataclass(frozen=True)
class Leftover:
    """A process of an older boot. `name` is its worker, `state` the last seen state of /proc/PID/stat."""

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
    """The result of reaping: `ended` processes are proven dead, `broken` ones outlived the bound. Both are empty if the owner
    lives."""

    ended: tuple[Leftover, ...] = ()
    broken: tuple[Leftover, ...] = ()


async def reap(
    instance: str, boot: int, recorded: Iterable[Recorded], owner: Identity | None, within_s: float = REAP_S
) -> Reaped:
    """End the leftovers of boots of `instance` older than `boot`, and wait at most `within_s` seconds for their death. `owner` is
    the daemon that daemon.json named before this one."""
    if owner is not None and owner.pid != os.getpid() and procfs.alive(owner):
        return Reaped()
    rows = tuple(recorded)
    known: dict[Key, Leftover] = {}
    deadline = time.monotonic() + within_s
    # Stop them first: a process that forks during the search could have a child without a tag.
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
    """Send another SIGKILL to the leftovers that still live. Returns them with their present state."""
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
    """Return the leftovers that live now. The result includes those of `known` that an earlier call found, and their
    descendants."""
    stats = {stat.pid: stat for stat in procfs.all_stats()}
    names = {pid: left.name for (pid, ticks), left in known.items() if pid in stats and stats[pid].ticks == ticks}
    names |= {stat.pid: name for stat in stats.values() if (name := _worker_of(stat, instance, boot))}
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
        # The leader still exists, so no other session can have the same number.
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


def _worker_of(stat: Stat, instance: str, boot: int) -> str:
    """Return the name of the worker if the process is of an older boot of this instance and its owner is dead, else ""."""
    env = procfs.environment(stat.pid)
    number = env.get("ARTD_BOOT", "")
    if env.get("ARTD_INSTANCE") != instance or not number.isdecimal() or int(number) >= boot or _owner_lives(env):
        return ""
    return env.get("ARTD_WORKER", "?")


def _owner_lives(env: dict[str, str]) -> bool:
    pid, _, ticks = env.get("ARTD_OWNER", "").partition(":")
    return pid.isdecimal() and ticks.isdecimal() and procfs.alive(Identity(procfs.boot_id(), int(pid), int(ticks)))


def _lineage(stats: dict[int, Stat]) -> set[int]:
    """Return this process and its ancestors. They are never leftovers, whatever environment they started in."""
    found: set[int] = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        stat = stats.get(pid)
        pid = stat.ppid if stat is not None else 0
    return found
