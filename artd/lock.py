"""One daemon per data folder: the lock file, and who holds it.

Owner of: DATA/artd.lock, flocked for the daemon's whole life. Invariants: the flock alone decides; the text in the file
only tells a refused second daemon, and `artctl`, whom to name.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from artd_schema.paths import LOCK, DaemonFile, boot_id, process_ticks, read_daemon_file


class Owned(Exception):
    """Another daemon runs on this data folder."""


def acquire(data: Path, version: str, drain_s: float) -> int:
    """Take the lock and write this process into it; the descriptor must stay open. Raises Owned."""
    handle = os.open(data / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    if not _flock(handle):
        os.close(handle)
        owner = read_daemon_file(data, LOCK)
        who = f"pid {owner.pid}, version {owner.version}" if owner else "its lock file is still empty"
        raise Owned(f"a daemon already runs on {data} ({who}). Next: artctl status, or artd stop --data-dir {data}")
    content = json.dumps(asdict(describe(version, drain_s))).encode()
    os.ftruncate(handle, 0)
    os.pwrite(handle, content, 0)
    return handle


def _flock(handle: int, patience_s: float = 0.5) -> bool:
    """Lock for this process alone; patient enough to outlive somebody's `held`."""
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)


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
