"""Makes the file-system calls that durability rests on.

A name appears only after its contents are durable, and its folder is fsynced before a row may point to it. After an
fsync error nobody knows what is durable, so this module calls `on_sync_error`, which ends the daemon before it can
answer anybody. A full disk is the exception: the file has no row yet, and artd writes it again from the start.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from artd_schema.crashpoint import reach

log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
PROBE, PROBE_BYTES = ".probe", 64 << 10
CHUNK_BYTES = 8 << 20
_serial = itertools.count()
_left: set[Path] = set()
"""Folders that nobody needs, and that a full disk kept `remove_tree` from removing."""
_later: dict[str, Callable[[], None]] = {}
"""Writes that found no room and wait for `catch_up`, by the name of their file."""
_durable: set[Path] = set()
"""Folders whose names this process made durable. A folder that it only finds may come from a process that was killed
before its fsync, and may vanish in a power loss."""

on_sync_error: Callable[[OSError], object] | None = None
"""Only the daemon sets this; for a command the exception is enough."""


def is_full(error: BaseException | None) -> bool:
    """Return whether an error says that the disk has no room (or is read-only), rather than that something is broken."""
    return isinstance(error, OSError) and error.errno in FULL


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fsync(fd)
    finally:
        os.close(fd)


def _fsync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if on_sync_error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            on_sync_error(error)
        raise


fsync_dir = fsync_file


def fsync_tree(folder: Path) -> None:
    """Fsync every file below `folder`, then every folder below it, then `folder` itself."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(Path(root) / name)
        fsync_dir(Path(root))


def write_again(folder: Path) -> None:
    """Write every file below `folder` again, byte for byte and in place, and fsync it all.

    After an fsync failed in another process, the kernel keeps pages that are right in memory, wrong on the disk, and marked
    clean: no later fsync writes them, and none fails. Writing the same bytes marks the pages dirty again.
    """
    for root, _, names in os.walk(folder):
        for name in names:
            _write_again(Path(root) / name)
    fsync_tree(folder)


def _write_again(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        at = 0
        while data := os.pread(fd, CHUNK_BYTES, at):
            at += os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """Create `path` and its parents durably, with mode 0700. If `path` exists, make its name durable."""
    found = path.is_dir()
    if found and path in _durable:
        return
    if not found:
        make_dir(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    try:
        fsync_dir(path.parent)
    except PermissionError:
        if not found:  # else another account, which may write there, made the folder
            raise
    _durable.add(path)


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file durably and atomically: write a new file beside it, fsync, rename, fsync the folder. Threads may write the
    same path at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_serial)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            _fsync(file.fileno())
        reach("file.written")
        os.rename(temporary, path)
        reach("file.renamed")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write the first file of a folder durably, without a temporary file beside it. Keep the contents of a file that exists."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        if os.fstat(fd).st_size == 0:
            os.write(fd, data)
        _fsync(fd)
    finally:
        os.close(fd)
    fsync_dir(path.parent)


def publish(source: Path, target: Path) -> None:
    """Rename a durable file or folder to its final name, and fsync both folders."""
    make_dir(target.parent)
    os.rename(source, target)
    reach("publish.renamed")
    fsync_dir(target.parent)
    fsync_dir(source.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder that nobody needs, if it exists; other callers may remove it at the same time.

    On a disk that is too full even for that, the folder stays until `remove_left`, or until the next start.
    """
    try:
        while path.exists():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
    except OSError as error:
        if not is_full(error):
            raise
        if path not in _left:
            log.warning("cannot remove %s before the disk has room, artd will try again: %s", path, error)
        _left.add(path)
    else:
        _left.discard(path)


def remove_left() -> None:
    """Try again to remove the folders that a full disk kept."""
    for path in _left.copy():
        remove_tree(path)


def write_or_later(name: str, write: Callable[[], None]) -> None:
    """Write a small file that nothing durable rests on. If the disk has no room, `catch_up` writes it later.

    `name` is the file's name: a newer write of the same name replaces an older one.
    """
    try:
        write()
    except OSError as error:
        if not is_full(error):
            raise
        if name not in _later:
            log.warning("cannot write %s before the disk has room, artd will try again: %s", name, error)
        _later[name] = write
    else:
        _later.pop(name, None)


def catch_up() -> None:
    """Write the files that found no room before. Call it where `write_or_later` is called: in the event loop."""
    for name, write in list(_later.items()):
        write_or_later(name, write)


def refusal(folder: Path) -> OSError | None:
    """Write and remove a small file in `folder`. Returns the error if it lacks space, quota or inodes, else None."""
    probe = folder / PROBE
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(PROBE_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None
