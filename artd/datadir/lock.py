"""One daemon per data folder: the lock, and who holds it.

Owner of: DATA/artd.lock. Invariants: both the folder itself and DATA/artd.lock are flocked for the daemon's whole life, so that
deleting a file does not delete the lock (a file system that cannot lock folders has the file's alone); the text in the file
only tells a refused second daemon, and `artctl`, whom to name; a shared lock is a reader's, which no daemon starts beside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from artd_schema.paths import LOCK, DaemonFile, boot_id, process_ticks, read_daemon_file

PATIENCE_S = 0.5
"""Outlives somebody's `held`."""
_CANNOT = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOTSUP, errno.ENOLCK, errno.EACCES)
"""What flock says of a folder on a file system (NFS, say) that locks only files open for writing."""


class Owned(Exception):
    """Another daemon runs on this data folder."""


@dataclass(frozen=True)
class Lock:
    """Held until `close`, or until the process ends."""

    handles: tuple[int, ...]

    def close(self) -> None:
        for handle in self.handles:
            os.close(handle)


def acquire(data: Path, version: str, drain_s: float) -> Lock:
    """Take the lock and write this process into DATA/artd.lock. Raises Owned, OSError."""
    with contextlib.ExitStack() as opened:
        folder = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, folder)
        file = os.open(data / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        opened.callback(os.close, file)
        if _flock(folder, fcntl.LOCK_EX, PATIENCE_S) and _flock(file, fcntl.LOCK_EX, PATIENCE_S):
            content = json.dumps(asdict(describe(version, drain_s))).encode()
            os.pwrite(file, content, 0)  # over what was there: a full disk has no other block to give
            os.ftruncate(file, len(content))
            opened.pop_all()
            return Lock((folder, file))
    raise _owned(data)


def forget(data: Path) -> None:
    """Let nobody be told of this process as the last daemon. The lock is held."""
    os.truncate(data / LOCK, 0)


def _owned(data: Path) -> Owned:
    if not held(data):  # so it is shared: a reader's
        return Owned(f"{data} is being read by `artd check`. Next: start again when that has ended")
    owner = read_daemon_file(data, LOCK) or read_daemon_file(data)
    where = f" --data-dir {shlex.quote(str(data))}"
    who = f"pid {owner.pid}, version {owner.version}" if owner else "its lock file is empty or gone"
    return Owned(f"a daemon already runs on {data} ({who}). Next: artctl status{where}, or artd stop{where}")


def _flock(handle: int, kind: int, patience_s: float) -> bool:
    """Take a lock of this kind, if it can be had in so many seconds; true as well where there are none."""
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return True


@contextmanager
def reading(data: Path) -> Iterator[bool]:
    """Keep daemons from starting while the folder is read. Yields False, and keeps nobody out, when one runs already."""
    with contextlib.ExitStack() as opened:
        yield all(_flock(handle, fcntl.LOCK_SH, 0.0) for handle in _lockable(data, opened))


def _lockable(data: Path, opened: contextlib.ExitStack) -> list[int]:
    """The folder and the lock file, as far as they are there and this user may read them."""
    handles = []
    for path in (data, data / LOCK):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            handles.append(os.open(path, os.O_RDONLY))
            opened.callback(os.close, handles[-1])
    return handles


def describe(version: str, drain_s: float) -> DaemonFile:
    """This process as a DaemonFile in state starting."""
    ticks = process_ticks(os.getpid())
    assert ticks is not None
    now = time.time_ns() // 1_000_000
    return DaemonFile(pid=os.getpid(), ticks=ticks, boot_id=boot_id(), version=version, started=now, drain_s=drain_s)


def held(data: Path) -> bool:
    """Whether some process holds the lock now. Takes a shared lock for an instant; `acquire` waits that out."""
    with contextlib.ExitStack() as opened:
        return not all(_flock(handle, fcntl.LOCK_SH, -1.0) for handle in _lockable(data, opened))
