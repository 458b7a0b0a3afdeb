"""Locks a data folder, so that only one daemon runs on it, and tells who holds the lock.

Owns DATA/artd.lock. The daemon holds a flock on the folder itself and on DATA/artd.lock for its whole life, so that
deleting the file does not delete the lock (where a file system cannot lock folders, only the file is locked). The text
in the file only names the holder, for a refused second daemon and `artctl`. A shared lock belongs to a reader; no
daemon starts beside it.
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
"""How long `acquire` tries: longer than `is_held` of another process keeps its shared lock."""
_CANNOT = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOTSUP, errno.ENOLCK, errno.EACCES)
"""Errors of flock for a folder on a file system (for example NFS) that locks only files open for writing."""


class Owned(Exception):
    """Another daemon runs on this data folder."""


@dataclass(frozen=True)
class Lock:
    """A held lock. It ends with `close`, or with the process."""

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
            os.pwrite(file, content, 0)  # overwrite the old text: a full disk has no new block
            os.ftruncate(file, len(content))
            opened.pop_all()
            return Lock((folder, file))
    raise _describe_owner(data)


def forget(data: Path) -> None:
    """Erase the name of this process as the last daemon. The caller holds the lock."""
    os.truncate(data / LOCK, 0)


def _describe_owner(data: Path) -> Owned:
    if not held(data):  # so the lock is a reader's shared one
        return Owned(f"`artd check` is reading {data}. Next: start again when it has ended")
    owner = read_daemon_file(data, LOCK) or read_daemon_file(data)
    where = f" --data-dir {shlex.quote(str(data))}"
    who = f"pid {owner.pid}, version {owner.version}" if owner else "its lock file is empty or gone"
    return Owned(f"a daemon already runs on {data} ({who}). Next: artctl status{where}, or artd stop{where}")


def _flock(handle: int, kind: int, patience_s: float) -> bool:
    """Try for `patience_s` seconds to take a lock of this kind. Returns whether it succeeded, or whether the file system has no
    such locks."""
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
    """Keep daemons from starting inside the `with` block. Yields False, and keeps none out, if a daemon runs already."""
    with contextlib.ExitStack() as opened:
        yield all(_flock(handle, fcntl.LOCK_SH, 0.0) for handle in _lockable(data, opened))


def _lockable(data: Path, opened: contextlib.ExitStack) -> list[int]:
    """Open the folder and the lock file, as far as they exist and this user may read them. Returns the descriptors."""
    handles = []
    for path in (data, data / LOCK):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            handles.append(os.open(path, os.O_RDONLY))
            opened.callback(os.close, handles[-1])
    return handles


def describe(version: str, drain_s: float) -> DaemonFile:
    """Return a DaemonFile of this process in state starting."""
    ticks = process_ticks(os.getpid())
    assert ticks is not None
    now = time.time_ns() // 1_000_000
    return DaemonFile(pid=os.getpid(), ticks=ticks, boot_id=boot_id(), version=version, started=now, drain_s=drain_s)


def held(data: Path) -> bool:
    """Return whether a process holds the lock now. It takes a shared lock for an instant; `acquire` waits that long."""
    with contextlib.ExitStack() as opened:
        return not all(_flock(handle, fcntl.LOCK_SH, -1.0) for handle in _lockable(data, opened))
