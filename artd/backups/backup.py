"""Makes a backup: one snapshot of the database and every file that it names, while the daemon runs or not.

Owns the backup's folder. A backup only reads the data folder and needs nothing from a daemon. Files are immutable and
rows change before files go, so a newer snapshot does not name a file that vanished during the copy: the next round
takes a newer snapshot and fetches only what is new. `backup.json` is written last, after a deep check, so a folder
without it is no backup.
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
from artd.check.report import Report
from artd.check.run import check
from artd.datadir.folder import RESTORING, is_free
from artd.datadir.layout import DataDir
from artd.store import fs
from artd.store.blobs import hash_file, place
from artd.store.migrate import require_known
from artd.store.readonly import open_readonly
from artd.store.selects import NOT_DELETED
from artd.supervise.code import install_files
from artd_schema.codec import UNREADABLE, to_json
from artd_schema.data.manifest import MANIFEST_FILE, CheckpointManifest, read_code
from artd_schema.packages import digest_files, read_tree
from artd_schema.paths import DATABASE, LOCK

log = logging.getLogger(__name__)
INFO = "backup.json"
ROUNDS = 10
MADE = frozenset({"blobs", "checkpoints", "code", "tmp", "logs", LOCK, INFO})
MADE_WITH = (DATABASE, RESTORING, f".{INFO}.")
"""Prefixes of names that a backup or a restore makes: SQLite adds files beside a database, and a file under way has another
name."""
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


class BackupError(Exception):
    """A backup cannot be made or used; the text says what to do."""


class NotEmpty(BackupError):
    """The target folder is not empty, or is in the wrong place."""


class RunStep(msgspec.Struct, frozen=True):
    """The state and the step of a run in the backup."""

    name: str
    state: str
    step: int


class BackupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `backup.json`. `database` is the sha256 of `artd.db` in hex, `instance` that of the original folder,
    `created` is in ms since the epoch."""

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
class CopyCounts:
    """How many files a backup linked and copied. A linked file shares its bytes with the data folder; `copied_bytes` are new."""

    linked: int = 0
    copied: int = 0
    copied_bytes: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class BackupResult:
    info: BackupInfo
    fetched: CopyCounts


@dataclass
class _Names:
    """The files and folders that one snapshot names, relative to the data folder."""

    blobs: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def backup(data: Path, target: Path, now: int, *, link: bool = True) -> BackupResult:
    """Write a complete, fsynced and checked backup of `data` into `target`, which is empty or does not exist.

    With `link`, immutable files share their bytes with the data folder where possible; otherwise they are copied.
    Raises BackupError, SchemaMismatch, OSError, and leaves nothing in `target` then.
    """
    _require_empty(data, target)
    fs.make_dir(target)
    target.chmod(0o700)
    try:
        for name in ("blobs", "checkpoints", "code"):
            fs.make_dir(target / name)
        fetched, names = _fetch_all(data, target, link)
        _fetch_code(data, target, names, fetched)
        info = _describe(target, names, now)
        _verify(target)
        fs.fsync_tree(target)
        fs.write_file(target / INFO, to_json(info))
    except BaseException:
        empty(target)
        raise
    fs.fsync_dir(target.parent)
    return BackupResult(info, fetched)


def read_info(folder: Path) -> BackupInfo:
    """Read `backup.json`. Raises BackupError when the folder is no complete backup."""
    try:
        return msgspec.json.decode((folder / INFO).read_bytes(), type=BackupInfo)
    except FileNotFoundError:
        raise BackupError(
            f"{folder} holds no {INFO}: it is no backup, or an unfinished one; use another backup"
        ) from None
    except (OSError, *UNREADABLE) as error:
        raise BackupError(f"{folder / INFO} cannot be read: {error}; use another backup") from None


def empty(folder: Path) -> None:
    """Remove only what a backup or a restore made in a folder. The folder itself stays: it may be a mount point."""
    for path in folder.iterdir():
        if path.name in MADE or path.name.startswith(MADE_WITH):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def summarise(report: Report) -> str:
    """Return the first violations of a report in one line."""
    first = [f"{outcome.name}: {v.what}: {v.text}" for outcome in report.broken for v in outcome.violations[:1]]
    return "; ".join(first[:3])


def _require_empty(data: Path, target: Path) -> None:
    """Check that `target` is empty and outside the data folder. Raises NotEmpty."""
    if not is_free(target):
        raise NotEmpty(f"{target} is not an empty folder: name another one, or empty it")
    inside, outside = target.resolve(), data.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise NotEmpty(f"one of {target} and the data folder {data} contains the other: name a folder outside")


# ---- fetching -------------------------------------------------------------------------------------------------------


def _fetch_all(data: Path, target: Path, link: bool) -> tuple[CopyCounts, _Names]:
    """Fetch a snapshot and the files that it names. Returns what was fetched, and the names.

    Raises BackupError when files vanish faster than they can be copied.
    """
    fetched = CopyCounts()
    lost = ""
    for _ in range(ROUNDS):
        fetched.rounds += 1
        snapshot(data / DATABASE, target / DATABASE)
        names = _read_names(target)
        lost = _fetch(data, target, names, link, fetched)
        if not lost:
            _prune(target, names)
            return fetched, names
        log.info("%s vanished before it was copied: taking another snapshot", lost)
    raise BackupError(
        f"{data / lost} does not exist, and the rows still name it after {ROUNDS} snapshots: either it is lost (artd check), "
        "or retention removes checkpoints faster than they can be copied (name a folder on the same disk)"
    )


def snapshot(source: Path, target: Path) -> None:
    """Copy a database, as one read transaction sees it, into one plain file. Raises sqlite3.Error, SchemaMismatch."""
    target.unlink(missing_ok=True)
    handle = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.close(handle)
    with closing(open_readonly(source)) as c:
        require_known(c)
        with closing(sqlite3.connect(target)) as out:
            c.backup(out)
            out.execute("PRAGMA journal_mode = DELETE")


def _read_names(folder: Path) -> _Names:
    with closing(open_readonly(folder / DATABASE)) as c:
        return _Names(
            blobs=[f"blobs/{place(sha)}" for (sha,) in c.execute("SELECT sha FROM blob")],
            # Oldest first, because retention removes the oldest first.
            folders=[row[0] for row in c.execute("SELECT dir FROM checkpoint WHERE state = 'committed' ORDER BY id")],
        )


def _fetch(data: Path, target: Path, names: _Names, link: bool, fetched: CopyCounts) -> str:
    """Fetch the files that `target` lacks. Returns the first name that vanished, "" if `target` has all."""
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


def _fetch_folder(source: Path, target: Path, link: bool, fetched: CopyCounts) -> bool:
    """Fetch a checkpoint folder, whole or not at all. Returns False if it vanished."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    fs.make_dir(partial)
    try:
        for name in _list_files(source):
            _fetch_file(source / name, partial / name, link, fetched)
    except FileNotFoundError:
        shutil.rmtree(partial)
        return False
    partial.rename(target)
    return True


def _list_files(folder: Path) -> Iterator[str]:
    """Yield the names in a checkpoint's manifest, and the manifest's own name. Raises FileNotFoundError, BackupError."""
    raw = (folder / MANIFEST_FILE).read_bytes()
    try:
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
    except UNREADABLE as error:
        raise BackupError(f"{folder / MANIFEST_FILE} cannot be read: {error}. Next: artd check") from None
    return iter([*(entry.name for entry in manifest.files), MANIFEST_FILE])


def _fetch_file(source: Path, target: Path, link: bool, fetched: CopyCounts) -> None:
    """Link or copy one file. Raises FileNotFoundError if the source vanished."""
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


def _fetch_code(data: Path, target: Path, names: _Names, fetched: CopyCounts) -> None:
    """Copy the packages' code that the checkpoints' manifests name. One that is gone or damaged is left out: to replay its jobs, the
    package has to be installed, as without a backup."""
    codes = {code.digest: code for name in names.folders for code in read_code(target / name).used}
    for digest, code in codes.items():
        source = data / "code" / digest
        files = read_tree(source)
        if digest_files(files) != digest:
            log.warning("%s of %s %s is gone or damaged: not in this backup", source, code.distribution, code.version)
            continue
        install_files(target, files)
        fetched.copied += len(files)
        fetched.copied_bytes += sum(map(len, files.values()))


def _prune(target: Path, names: _Names) -> None:
    """Remove files that an earlier snapshot named and the last one does not."""
    data = DataDir(target, target)
    keep = set(names.folders) | set(names.blobs)
    for path in [*data.checkpoints.glob("*/*"), *data.blobs.glob("*/*")]:
        if str(path.relative_to(target)) not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# ---- proving --------------------------------------------------------------------------------------------------------


def _describe(target: Path, names: _Names, now: int) -> BackupInfo:
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


def _verify(target: Path) -> None:
    report = check(target, deep=True)
    if not report.clean:
        raise BackupError(f"the backup is not whole ({summarise(report)}), so artd removed it. Next: artd check --deep")
