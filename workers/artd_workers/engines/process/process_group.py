"""A server's process group, seen through /proc: who is in it, what scratch files it holds, and its end.

Purpose: end a server that does not end itself, and leave nothing of it in /dev/shm or /tmp.
Owner of: no state. Invariants: only processes of the caller's own session are ever signalled (a group number that was
recycled elsewhere is in another session); a file is scratch only if it lies directly in /dev/shm or /tmp under a name that
Python's, torch's or an engine's own scratch has, is this user's and newer than the server: logs, models and checkpoints, which a
server holds open too, never are.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from artd_schema.scratch import SCRATCH

SHM = Path("/dev/shm")
_POLL_S = 0.02


def members(pgid: int) -> list[int]:
    """Live processes of the group that are in this process's session. One whose first thread alone has ended, a zombie by its
    state, lives: it may hold a GPU's memory still."""
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
    """Scratch files that these processes map or hold open, of this user, changed at `since` (epoch s) or later."""
    names: set[str] = set()
    inodes: set[tuple[int, int]] = set()
    for pid in pids:
        mapped, semaphores = _mapped(pid)
        names |= mapped | _opened(pid)
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
    """SIGKILL every member until none lives; returns those that still live after wait_s (uninterruptible in the kernel)."""
    end = time.monotonic() + wait_s
    while alive := members(pgid):
        for pid in alive:
            signal_process(pid, signal.SIGKILL)
        if time.monotonic() >= end:
            return alive
        time.sleep(_POLL_S)
    return []


def wait_gone(pgid: int, wait_s: float) -> bool:
    """Whether the group has no live member within wait_s."""
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
    """Fields of /proc/PID/stat from the third on: 0 state, 2 pgrp, 3 session, 17 threads, 19 start (empty: no such process)."""
    try:
        text = Path("/proc", pid, "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _mapped(pid: int) -> tuple[set[str], set[tuple[int, int]]]:
    """Names of the scratch files that it maps, and (device, inode) of what it maps in /dev/shm under a name that is gone: sem_open
    makes a semaphore under another name than the one that stays."""
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
    """The names under which these lie in /dev/shm."""
    found = set()
    for path in SHM.glob("sem.mp-*") if inodes else ():
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue
        if (info.st_dev, info.st_ino) in inodes:
            found.add(path)
    return found


def _opened(pid: int) -> set[str]:
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
