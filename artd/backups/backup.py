"""A backup: one snapshot of the database and every file that it names, while the daemon runs or not.

Owner of: the backup's folder. Invariants: the data folder is only read, so nothing is asked of a daemon; files are
immutable and rows change before files go, so a file that went while it was fetched is one that a newer snapshot does not
name: then the next round takes one, and fetches only what is new; `backup.json` is written last, after a deep check, so
a folder without it is no backup.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from artd import __version__
from artd.check import Report, check
from artd.datadir.folder import RESTORING, is_free
from artd.datadir.layout import DataDir
from artd.store import fs
from artd.store.blobs import hash_file, place
from artd.store.migrate import require_known
from artd.store.readonly import open_readonly
from artd.store.selects import NOT_DELETED
from artd.training import commit
from artd_schema.codec import UNREADABLE, to_json
from artd_schema.manifest import CheckpointManifest
from artd_schema.paths import DATABASE, LOCK

log = logging.getLogger(__name__)
INFO = "backup.json"
ROUNDS = 10
MADE = frozenset({"blobs", "checkpoints", "tmp", "logs", LOCK, INFO})
MADE_WITH = (DATABASE, RESTORING, f".{INFO}.")
"""What names begin with: a database has files beside it, a file that is being written another name."""
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


class BackupError(Exception):
    """A backup that cannot be made or used; the text says what to do."""


class NotEmpty(BackupError):
    """The folder to write to holds something already, or lies in the wrong place."""


class RunStep(msgspec.Struct, frozen=True):
    """A run as it stands in the backup."""

    name: str
    state: str
    step: int


class BackupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`backup.json`. database: sha256 hex of `artd.db`; instance: of the folder that it was made from; created: ms since
    the epoch."""

    version: int = 1
    artd: str
    instance: str
    created: int
    database: str
    database_bytes: int
    blobs: int
    checkpoints: int
    runs: tuple[RunStep, ...]


@dataclass
class Fetched:
    """How the files came: linked ones share their bytes with the data folder. copied_bytes: written anew."""

    linked: int = 0
    copied: int = 0
    copied_bytes: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Made:
    info: BackupInfo
    fetched: Fetched


@dataclass
class _Named:
    """What one snapshot names, relative to the data folder."""

    blobs: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def backup(data: Path, target: Path, now: int, *, link: bool = True) -> Made:
    """Write a complete, fsynced and checked backup of `data` into `target`, which is empty or not there.

    link: share the bytes of immutable files with the data folder where that is possible, instead of copying them.
    Errors: BackupError, SchemaMismatch, OSError; nothing of `target` is left then.
    """
    _require_empty(data, target)
    fs.make_dir(target)
    target.chmod(0o700)
    try:
        for name in ("blobs", "checkpoints"):
            fs.make_dir(target / name)
        fetched, names = _fetch_all(data, target, link)
        info = _describe(target, names, now)
        _verified(target)
        fs.fsync_tree(target)
        fs.write_file(target / INFO, to_json(info))
    except BaseException:
        empty(target)
        raise
    fs.fsync_dir(target.parent)
    return Made(info, fetched)


def read_info(folder: Path) -> BackupInfo:
    """Errors: BackupError when the folder is no complete backup."""
    try:
        return msgspec.json.decode((folder / INFO).read_bytes(), type=BackupInfo)
    except FileNotFoundError:
        raise BackupError(f"{folder} holds no {INFO}: it is no backup, or one that was not finished") from None
    except (OSError, *UNREADABLE) as error:
        raise BackupError(f"{folder / INFO} cannot be read: {error}") from None


def empty(folder: Path) -> None:
    """Remove what a backup or a restore has made in a folder, and nothing else; the folder itself may be a mount point."""
    for path in folder.iterdir():
        if path.name in MADE or path.name.startswith(MADE_WITH):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def told(report: Report) -> str:
    """The first violations of a report, in one line."""
    first = [f"{outcome.name}: {v.what}: {v.text}" for outcome in report.broken for v in outcome.violations[:1]]
    return "; ".join(first[:3])


def _require_empty(data: Path, target: Path) -> None:
    """Errors: NotEmpty."""
    if not is_free(target):
        raise NotEmpty(f"{target} is not an empty folder: give another, or empty it")
    inside, outside = target.resolve(), data.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise NotEmpty(f"{target} and the data folder {data} lie in each other: give a folder outside")


# ---- fetching -------------------------------------------------------------------------------------------------------


def _fetch_all(data: Path, target: Path, link: bool) -> tuple[Fetched, _Named]:
    """Snapshot and files, and what the snapshot names. Errors: BackupError when files go faster than they can be fetched."""
    fetched = Fetched()
    lost = ""
    for _ in range(ROUNDS):
        fetched.rounds += 1
        snapshot(data / DATABASE, target / DATABASE)
        names = _named(target)
        lost = _fetch(data, target, names, link, fetched)
        if not lost:
            _prune(target, names)
            return fetched, names
        log.info("%s went while it was fetched: another snapshot", lost)
    raise BackupError(
        f"{data / lost} is not there, and the rows still name it after {ROUNDS} snapshots: either it is lost (artd check), "
        "or retention removes checkpoints faster than they can be copied (give a folder on the same disk)"
    )


def snapshot(source: Path, target: Path) -> None:
    """Copy a database as one read transaction sees it, to one plain file. Errors: sqlite3.Error, SchemaMismatch."""
    target.unlink(missing_ok=True)
    handle = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.close(handle)
    with closing(open_readonly(source)) as c:
        require_known(c)
        with closing(sqlite3.connect(target)) as out:
            c.backup(out)
            out.execute("PRAGMA journal_mode = DELETE")


def _named(folder: Path) -> _Named:
    with closing(open_readonly(folder / DATABASE)) as c:
        return _Named(
            blobs=[f"blobs/{place(sha)}" for (sha,) in c.execute("SELECT sha FROM blob")],
            # Oldest first: they are the first to go.
            folders=[row[0] for row in c.execute("SELECT dir FROM checkpoint WHERE state = 'committed' ORDER BY id")],
        )


def _fetch(data: Path, target: Path, names: _Named, link: bool, fetched: Fetched) -> str:
    """Fetch what is named and not there yet; the first name that has gone, "" when all is there."""
    for name in names.folders:
        if not (target / name).is_dir() and not _fetch_folder(data / name, target / name, link, fetched):
            return name
    for name in names.blobs:
        try:
            if not (target / name).exists():
                fs.make_dir((target / name).parent)
                _fetch_file(data / name, target / name, link, fetched)
        except FileNotFoundError:
            return name
    return ""


def _fetch_folder(source: Path, target: Path, link: bool, fetched: Fetched) -> bool:
    """A checkpoint folder, whole or not at all; False when it has gone."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    fs.make_dir(partial)
    try:
        for name in _files_of(source):
            _fetch_file(source / name, partial / name, link, fetched)
    except FileNotFoundError:
        shutil.rmtree(partial)
        return False
    partial.rename(target)
    return True


def _files_of(folder: Path) -> Iterator[str]:
    """Names in a checkpoint's manifest, and the manifest's own. Errors: FileNotFoundError, BackupError."""
    raw = (folder / commit.MANIFEST).read_bytes()
    try:
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
    except UNREADABLE as error:
        raise BackupError(f"{folder / commit.MANIFEST} cannot be read: {error}. Next: artd check") from None
    return iter([*(entry.name for entry in manifest.files), commit.MANIFEST])


def _fetch_file(source: Path, target: Path, link: bool, fetched: Fetched) -> None:
    """Errors: FileNotFoundError when the source has gone."""
    if link:
        try:
            os.link(source, target)
            fetched.linked += 1
            return
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
    shutil.copyfile(source, target)
    target.chmod(0o600)
    fetched.copied += 1
    fetched.copied_bytes += target.stat().st_size


def _prune(target: Path, names: _Named) -> None:
    """Remove what an earlier snapshot named and the last one does not."""
    data = DataDir(target, target)
    keep = set(names.folders) | set(names.blobs)
    for path in [*data.checkpoints.glob("*/*"), *data.blobs.glob("*/*")]:
        if str(path.relative_to(target)) not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# ---- proving --------------------------------------------------------------------------------------------------------


def _describe(target: Path, names: _Named, now: int) -> BackupInfo:
    with closing(open_readonly(target / DATABASE)) as c:
        instance = c.execute("SELECT value FROM meta WHERE key = 'instance'").fetchone()
        runs = tuple(
            RunStep(*row) for row in c.execute(f"SELECT name, state, step FROM run WHERE {NOT_DELETED} ORDER BY id")
        )
    sha, size = hash_file(target / DATABASE)
    return BackupInfo(
        artd=__version__, instance=instance[0] if instance else "", created=now, database=sha, database_bytes=size,
        blobs=len(names.blobs), checkpoints=len(names.folders), runs=runs,
    )  # fmt: skip


def _verified(target: Path) -> None:
    report = check(target, deep=True)
    if not report.clean:
        raise BackupError(
            f"the backup would not be whole ({told(report)}), so nothing was kept. Next: artd check --deep"
        )
