"""One daemon per data folder: the lock file, and who holds it.

Owner of: DATA/artd.lock, flocked for the daemon's whole life. Invariants: the flock alone decides; the text in the file
only tells a refused second daemon, and `artctl`, whom to name; a shared lock is a reader's, which no daemon starts beside.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from artd_schema.paths import LOCK, DaemonFile, boot_id, process_ticks, read_daemon_file

PATIENCE_S = 0.5
"""Outlives somebody's `held`."""


class Owned(Exception):
    """Another daemon runs on this data folder."""


def acquire(data: Path, version: str, drain_s: float) -> int:
    """Take the lock and write this process into it; the descriptor must stay open. Raises Owned."""
    handle = os.open(data / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    if not _flock(handle, fcntl.LOCK_EX, PATIENCE_S):
        os.close(handle)
        if not held(data):  # so it is shared: a reader's
            raise Owned(f"{data} is being read by `artd check`. Next: start again when that has ended")
        owner = read_daemon_file(data, LOCK)
        where = f" --data-dir {shlex.quote(str(data))}"
        who = f"pid {owner.pid}, version {owner.version}" if owner else "its lock file is still empty"
        raise Owned(f"a daemon already runs on {data} ({who}). Next: artctl status{where}, or artd stop{where}")
    content = json.dumps(asdict(describe(version, drain_s))).encode()
    os.ftruncate(handle, 0)
    os.pwrite(handle, content, 0)
    return handle


def _flock(handle: int, kind: int, patience_s: float) -> bool:
    """Take a lock of this kind, if it can be had in so many seconds."""
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)


@contextmanager
def reading(data: Path) -> Iterator[bool]:
    """Keep daemons from starting while the folder is read. Yields False, and keeps nobody out, when one runs already."""
    if not (data / LOCK).exists():  # no daemon ever ran here: a backup, or a folder made by hand
        yield True
        return
    handle = os.open(data / LOCK, os.O_RDONLY)
    try:
        yield _flock(handle, fcntl.LOCK_SH, 0.0)
    finally:
        os.close(handle)


def describe(version: str, drain_s: float) -> DaemonFile:
    """This process as a DaemonFile in state starting."""
    ticks = process_ticks(os.getpid())
    assert ticks is not None
    now = time.time_ns() // 1_000_000
    return DaemonFile(pid=os.getpid(), ticks=ticks, boot_id=boot_id(), version=version, started=now, drain_s=drain_s)


def held(data: Path) -> bool:
    """Whether some process holds the lock now. Takes a shared lock for an instant; `acquire` waits that out."""
    try:
        handle = os.open(data / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
