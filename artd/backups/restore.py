"""Restores a backup into a data folder: a new instance, which continues where the backup was taken.

Owns the new folder until it is complete. A restore only reads the backup, and the new folder shares no file with it.
`artd.db` appears last, after a deep check; no daemon starts on the folder before that.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from artd import __version__
from artd.check.run import check
from artd.datadir import lock
from artd.datadir.folder import IGNORED, RESTORING, is_free
from artd.datadir.layout import DataDir
from artd.store import fs
from artd.store.blobs import hash_file
from artd.store.migrate import require_known
from artd.store.store import emit
from artd.store.writer import connect
from artd_schema.paths import DATABASE

from .backup import BackupError, BackupInfo, NotEmpty, empty, read_info, summarise
from .instance import renew


@dataclass(frozen=True)
class RestoreResult:
    """The result of a restore. `instance` is the new one, `leap` the number added to its ids (see `instance`)."""

    info: BackupInfo
    instance: str
    leap: int


def restore(backup: Path, data: Path, now: int) -> RestoreResult:
    """Make the data folder `data`, which is empty or does not exist, from `backup`.

    Raises BackupError, lock.Owned, SchemaMismatch, OSError, and leaves nothing in `data` then.
    """
    info = _require_whole(backup)
    _require_empty(data)
    fs.make_dir(data)
    data.chmod(0o700)
    held = lock.acquire(data, __version__, 0.0)
    try:
        restored = _fill(backup, data, info, now)
        lock.forget(data)  # else messages would name this process as the last daemon
    except BaseException:
        empty(data)
        raise
    finally:
        held.close()
    return restored


def _require_whole(backup: Path) -> BackupInfo:
    """Check the backup quickly, before anything is written. Raises BackupError."""
    info = read_info(backup)
    if not (backup / DATABASE).is_file() or hash_file(backup / DATABASE) != (info.database, info.database_bytes):
        raise BackupError(f"{backup / DATABASE} is missing or has changed since the backup: use another backup")
    report = check(backup)
    if not report.clean:
        raise BackupError(f"{backup} is damaged ({summarise(report)}): use another backup")
    return info


def _require_empty(data: Path) -> None:
    if not is_free(data):
        raise NotEmpty(f"{data} is not an empty folder: name another one with --data-dir, or move it away")


def _fill(backup: Path, data: Path, info: BackupInfo, now: int) -> RestoreResult:
    folder = DataDir(data, data)
    for name in (folder.blobs, folder.checkpoints):
        shutil.copytree(backup / name.name, name, copy_function=shutil.copyfile)
    if (backup / folder.code.name).is_dir():  # an older artd's backup has none
        shutil.copytree(backup / folder.code.name, folder.code, copy_function=shutil.copyfile)
    for made in (folder.tmp, folder.logs):
        made.mkdir(mode=0o700)
    database = data / RESTORING
    shutil.copyfile(backup / DATABASE, database)
    with closing(connect(database)) as c:
        require_known(c)
        c.execute("BEGIN IMMEDIATE")
        instance, leap = renew(c, now, database)
        emit(c, now, "", "store.restored", instance, original=info.instance, backup=info.created, leap=leap)
        c.execute("COMMIT")
        c.execute("PRAGMA journal_mode = DELETE")  # one plain file, which can be renamed; the daemon makes it WAL again
    report = check(data, deep=True, database=database)
    if not report.clean:
        raise BackupError(f"{backup} is damaged ({summarise(report)}): use another backup")
    _restrict_modes(data)
    fs.fsync_tree(data)
    fs.publish(database, data / DATABASE)
    fs.fsync_dir(data.parent)
    return RestoreResult(info, instance, leap)


def _restrict_modes(data: Path) -> None:
    for root, folders, names in os.walk(data):
        folders[:] = set(folders) - IGNORED
        Path(root).chmod(0o700)
        for name in names:
            (Path(root) / name).chmod(0o600)
