"""The few file-system calls that durability rests on, in one place.

Invariants: a name appears only after its contents are durable; whoever publishes a name fsyncs its folder before a
row may point to it. An error of fsync is never passed over: the caller must treat the file as unknown and the daemon
ends.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from artd_schema.crashpoint import reach


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


fsync_dir = fsync_file


def fsync_tree(folder: Path) -> None:
    """Every file of `folder`, then every folder below it, then itself."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(Path(root) / name)
        fsync_dir(Path(root))


def make_dir(path: Path) -> None:
    """Create `path` and its parents, 0700, durably."""
    if path.is_dir():
        return
    make_dir(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    fsync_dir(path.parent)


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Durable and atomic: a new file beside, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        reach("file.written")
        os.rename(temporary, path)
        reach("file.renamed")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def publish(source: Path, target: Path) -> None:
    """Rename a durable file or folder to its final name, durably on both sides."""
    make_dir(target.parent)
    os.rename(source, target)
    reach("publish.renamed")
    fsync_dir(target.parent)
    fsync_dir(source.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder if it is there."""
    if path.exists():
        shutil.rmtree(path)
