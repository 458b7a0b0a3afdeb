"""A server's process group, seen through /proc: its processes, their scratch files, and its end.

It ends a server that does not end itself, and leaves nothing of it in /dev/shm or /tmp. Only processes of the caller's own
session are ever signalled, because a group number that was recycled elsewhere is in another session. A scratch file is directly
in /dev/shm or /tmp under a name that Python, torch or an engine gives scratch files, belongs to this user and is newer than the
server. So logs, models and checkpoints, which a server also has open, are never removed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from artd_schema.run.scratch import SCRATCH

SHM = Path("/dev/shm")
_POLL_S = 0.02


def members(pgid: int) -> list[int]:
    """Return the live processes of the group that are in this process's session.

    A process whose first thread has ended, but not its others, is a zombie by its state and still counts: it may hold a GPU's
    memory.
    """
    session = os.getsid(0)
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        stat = _stat(entry)
        if stat and (stat[0] not in "ZX" or int(stat[17]) > 1) and (int(stat[2]), int(stat[3])) == (pgid, session):
            found.append(int(entry))
    return found


def scratch_files(pids: Iterable[int], since: float) -> set[Path]:
    """Return this user's scratch files that the processes map or have open, changed at `since` (seconds since the epoch) or
    later."""
    names: set[str] = set()
    inodes: set[tuple[int, int]] = set()
    for pid in pids:
        mapped, semaphores = _find_mapped(pid)
        names |= mapped | _find_open(pid)
        inodes |= semaphores
    found = set()
    for path in {Path(name) for name in names} | _semaphores(inodes):
        try:
            info = path.lstat()
        except OSError:
            continue
        if info.st_uid == os.getuid() and info.st_ctime >= since and path.is_file():
            found.add(path)
    return found


def kill(pgid: int, wait_s: float) -> list[int]:
    """Send SIGKILL to every member until none lives. Returns those that still live after `wait_s` seconds, stuck in the kernel."""
    end = time.monotonic() + wait_s
    while alive := members(pgid):
        for pid in alive:
            signal_process(pid, signal.SIGKILL)
        if time.monotonic() >= end:
            return alive
        time.sleep(_POLL_S)
    return []


def wait_gone(pgid: int, wait_s: float) -> bool:
    """Return whether the group has no live member within `wait_s` seconds."""
    end = time.monotonic() + wait_s
    while members(pgid):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _stat(pid: str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: 0 state, 2 pgrp, 3 session, 17 threads, 19 start. Empty: no such
    process."""
    try:
        text = Path("/proc", pid, "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _find_mapped(pid: int) -> tuple[set[str], set[tuple[int, int]]]:
    """Return the names of mapped scratch files, and (device, inode) of mappings in /dev/shm whose name is gone.

    sem_open maps a semaphore under a temporary name, and keeps the file under another.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set(), set()
    names, inodes = set(), set()
    for line in lines:
        if "/" not in line:
            continue
        name = line[line.index("/") :]
        if SCRATCH.fullmatch(name):
            names.add(name)
        elif name.startswith(f"{SHM}/sem."):
            major, _, minor = line.split()[3].partition(":")
            inodes.add((os.makedev(int(major, 16), int(minor, 16)), int(line.split()[4])))
    return names, inodes


def _semaphores(inodes: set[tuple[int, int]]) -> set[Path]:
    """Return the names in /dev/shm of these (device, inode)."""
    found = set()
    for path in SHM.glob("sem.mp-*") if inodes else ():
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue
        if (info.st_dev, info.st_ino) in inodes:
            found.add(path)
    return found


def _find_open(pid: int) -> set[str]:
    folder = f"/proc/{pid}/fd"
    found = set()
    try:
        for fd in os.listdir(folder):
            try:
                target = os.readlink(f"{folder}/{fd}")
            except FileNotFoundError:
                continue
            if SCRATCH.fullmatch(target):
                found.add(target)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    return found
