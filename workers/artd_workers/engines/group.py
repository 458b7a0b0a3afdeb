"""A server's process group, seen through /proc: who is in it, what scratch files it holds, and its end.

Purpose: end a server that does not end itself, and leave nothing of it in /dev/shm or /tmp.
Owner of: no state. Invariants: only processes of the caller's own session are ever signalled (a group number that was
recycled elsewhere is in another session); a file is scratch only if it lies directly in /dev/shm or /tmp under a name that
Python's, torch's or vLLM's own scratch has, is this user's and newer than the server: logs, models and checkpoints, which a
server holds open too, never are.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

SCRATCH = re.compile(r"/(dev/shm|tmp)/(psm_|sem\.mp-|torch_|vllm_)[^/]*")
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


def start_ticks(pid: int) -> int:
    """Clock ticks between boot and the start of a process: with the pid, its identity in this boot. 0 = no such process."""
    stat = _stat(str(pid))
    return int(stat[19]) if stat else 0


def scratch_files(pids: Iterable[int], since: float) -> set[Path]:
    """Scratch files that these processes map or hold open, of this user, changed at `since` (epoch s) or later."""
    names: set[str] = set()
    for pid in pids:
        names |= _mapped(pid) | _opened(pid)
    found = set()
    for name in names:
        path = Path(name)
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


def remove(paths: Iterable[Path]) -> None:
    """Unlink files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def record(paths: Iterable[Path], file: Path) -> None:
    """Write the list of scratch files, with their inodes, for `sweep` of a later process."""
    lines = []
    for path in sorted(paths):
        try:
            lines.append(f"{path.lstat().st_ino} {path}\n")
        except FileNotFoundError:
            continue
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text("".join(lines))
    temporary.replace(file)


def sweep(file: Path) -> list[Path]:
    """Remove the recorded files that are still there, and the record; returns them. A name that was taken anew is left."""
    found = []
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        inode, _, name = line.partition(" ")
        path = Path(name)
        if SCRATCH.fullmatch(name) and path.exists() and str(path.lstat().st_ino) == inode:
            found.append(path)
    remove(found)
    file.unlink(missing_ok=True)
    return found


def _stat(pid: str) -> list[str]:
    """Fields of /proc/PID/stat from the third on: 0 state, 2 pgrp, 3 session, 17 threads, 19 start (empty: no such process)."""
    try:
        text = Path("/proc", pid, "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    paths = (line[line.index("/") :] for line in lines if "/" in line)
    return {path for path in paths if SCRATCH.fullmatch(path)}


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
