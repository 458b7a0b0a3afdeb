"""The few file-system calls that durability rests on, in one place.

Invariants: a name appears only after its contents are durable; whoever publishes a name fsyncs its folder before a
row may point to it. After an error of fsync nobody knows what is durable: `on_sync_error` is called, which ends the daemon,
before anybody can be answered. Only a full disk is no such error: what was being written has no row yet, and is written
again from the start.
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
"""Folders that nobody needs, and that a full disk keeps."""
_later: dict[str, Callable[[], None]] = {}
"""Writes that found no room, by the name of their file."""
_durable: set[Path] = set()
"""Folders whose names this process made durable. One that it finds may have been made by a process that was killed
before its fsync, so finding it says nothing about the next power loss."""

on_sync_error: Callable[[OSError], object] | None = None
"""Set by the daemon, and by nobody else: for a command the exception is enough."""


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that nothing more can be written, rather than that something is broken."""
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
    """Every file of `folder`, then every folder below it, then itself."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(Path(root) / name)
        fsync_dir(Path(root))


def write_again(folder: Path) -> None:
    """Write every file below `folder` again, byte for byte and in place, and fsync it all. After an fsync that failed in another
    process the kernel keeps pages that are right in memory, wrong on the disk, and clean: no later fsync writes them, and
    none fails. Only pages that were written again are."""
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
    """Create `path` and its parents, 0700, durably; the name of one that is there already is made durable too."""
    found = path.is_dir()
    if found and path in _durable:
        return
    if not found:
        make_dir(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    try:
        fsync_dir(path.parent)
    except PermissionError:
        if not found:  # else it was made by whoever may write there
            raise
    _durable.add(path)


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Durable and atomic: a new file beside, fsync, rename, fsync of the folder. Threads may write the same one at once."""
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
    """The first file of a folder: durable, and never half there under another name. One that is there already is kept."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        if os.fstat(fd).st_size == 0:
            os.write(fd, data)
        _fsync(fd)
    finally:
        os.close(fd)
    fsync_dir(path.parent)


def publish(source: Path, target: Path) -> None:
    """Rename a durable file or folder to its final name, durably on both sides."""
    make_dir(target.parent)
    os.rename(source, target)
    reach("publish.renamed")
    fsync_dir(target.parent)
    fsync_dir(source.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder that nobody needs, if it is there, whoever else removes it meanwhile. A disk that is too full even for that
    keeps it until `remove_left`, or until the next start."""
    try:
        while path.exists():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
    except OSError as error:
        if not is_full(error):
            raise
        if path not in _left:
            log.warning("%s stays until there is room to remove it: %s", path, error)
        _left.add(path)
    else:
        _left.discard(path)


def remove_left() -> None:
    """Try again to remove what a full disk has kept."""
    for path in _left.copy():
        remove_tree(path)


def write_or_later(name: str, write: Callable[[], None]) -> None:
    """Write a small file that nothing durable rests on; one that finds no room is written by `catch_up`. name: of the file; a
    newer write of it takes the place of an older one."""
    try:
        write()
    except OSError as error:
        if not is_full(error):
            raise
        if name not in _later:
            log.warning("%s cannot be written before there is room: %s", name, error)
        _later[name] = write
    else:
        _later.pop(name, None)


def catch_up() -> None:
    """Write what found no room before. Called where `write_or_later` is: in the event loop."""
    for name, write in list(_later.items()):
        write_or_later(name, write)


def refusal(folder: Path) -> OSError | None:
    """Why no small file can be written in `folder` for want of space, quota or inodes; None when it can."""
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
