"""Tells whether the daemon that holds the lock is healthy: its heartbeat is recent and its sockets exist.

It never asks the daemon, so a stopped or hung one cannot delay the answer. A daemon that is starting and has not written a
heartbeat yet is healthy.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from artd.health import pulse
from artd.supervise.guardian import read_stat
from artd_schema import paths

from .daemon_probe import Daemon, data_dir_option, start_command


class Problem(NamedTuple):
    """What keeps artd from working, and the command or action that helps."""

    what: str
    next: str


def find_problem(data: Path, found: Daemon) -> Problem | None:
    """Return what is wrong with a running daemon, None when it is healthy or none runs."""
    told = found.file
    if not found.running or told is None:
        return None
    socket = told.socket.removeprefix("ipc://")
    folder = Path(socket).parent if socket else paths.runtime_dir(data, create=False)
    seen = pulse.read(folder)
    if socket and (seen is None or not Path(socket).is_socket()):
        return Problem(
            f"the daemon's sockets are gone from {folder}: nobody can connect; it makes them again within seconds",
            f"artctl logs daemon{data_dir_option(data)}",
        )
    if seen is None:
        return None  # it starts
    age = _age(told.ticks)  # an older heartbeat is the one of the daemon before it
    loop, writer = (min(each if each >= 0 else age, age) for each in seen)
    if max(loop, writer) <= pulse.STALE_S:
        return None
    stat = read_stat(told.pid)
    if stat is not None and stat.state in "Tt":
        return Problem(f"the daemon (pid {told.pid}) is stopped, by SIGSTOP or a debugger", f"kill -CONT {told.pid}")
    if loop > pulse.STALE_S:
        return Problem(
            f"the daemon (pid {told.pid}) hangs: no sign of life for {loop:.0f} s",
            f"artctl logs daemon{data_dir_option(data)}; if it goes on so: kill -9 {told.pid}, then {start_command(data)}",
        )
    return Problem(
        f"nothing is written to the database for {writer:.0f} s: the disk of {data} hangs, or is full",
        f"dmesg, df {data}, artctl logs daemon{data_dir_option(data)}",
    )


def _age(ticks: int) -> float:
    """Return the seconds since a process began. `ticks`: its start time as in /proc."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
