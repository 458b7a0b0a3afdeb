"""Reads /proc: identities, sessions and environment tags of processes, and the counts of the kernel's memory killer.

(pid, start ticks) names a process within one boot of the machine. A process that vanishes during a read counts as
absent, never as an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .guardian import Stat, all_stats, descendants, read_stat, signal_exact
from .guardian import read_environment as environment

__all__ = [
    "Identity",
    "Stat",
    "alive",
    "all_stats",
    "boot_id",
    "descendants",
    "environment",
    "identity",
    "oom_kills",
    "read_stat",
    "signal_exact",
    "strike",
]


class Identity(NamedTuple):
    """Names one process for ever. `boot_id` is the kernel's; `ticks` is the start time in clock ticks since the machine's start."""

    boot_id: str
    pid: int
    ticks: int


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity(pid: int | None = None) -> Identity:
    """Return the identity of a living process, by default this one. Raises ProcessLookupError."""
    stat = read_stat(os.getpid() if pid is None else pid)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return Identity(boot_id(), stat.pid, stat.ticks)


def alive(who: Identity) -> bool:
    """Return whether that very process lives; a zombie does not."""
    stat = read_stat(who.pid)
    return stat is not None and stat.ticks == who.ticks and not stat.dead and boot_id() == who.boot_id


def strike(processes: Iterable[Stat], number: int) -> None:
    """Signal exactly these processes. A process of another user stays, and the caller's next look finds it again."""
    for stat in processes:
        try:
            signal_exact(stat.pid, stat.ticks, number)
        except PermissionError:
            continue


def oom_kills() -> int:
    """Return how many processes the kernel killed for lack of memory: in this process's control group if that counts them, else
    on the machine."""
    for path in (_memory_events(), Path("/proc/vmstat")):
        if path is None or not path.exists():
            continue
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def _memory_events() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events"
    return None
