"""Checks that a disk image keeps every promise: `artd check --deep`, and everything that somebody was told before the power
loss.

An image has the present schema or the made-up next one, and the artd of that schema judges it. What was told is compared with
rows by SQL of this file, not by the services that wrote them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

from artd.backups import backup
from artd.check.run import check
from artd.datadir.layout import DataDir
from artd.store.migrate import SchemaMismatch, backup_path, migrate, require_known
from artd.store.readonly import open_readonly
from artd.store.writer import connect
from artd.training import commit
from tests.daemon.rig import history
from tests.fixtures.schema.next import NOW, released

from .recording import Told


def violations(image: Path, told: Iterable[Told]) -> Iterator[str]:
    """Every broken promise of the rig's folder `image`. told: up to the cut."""
    told, data = list(told), image / "data"
    if not _has_schema(data / "artd.db"):
        if told:
            yield f"there is no schema, but {told[-1]} was told"
        return
    with released() if schema_of(data / "artd.db") > NOW else nullcontext():
        report = check(data, deep=True)
    for outcome in report.broken:
        for found in outcome.violations[:3]:
            yield f"{outcome.name}: {found.what}: {found.text}"
    with closing(sqlite3.connect(data / "artd.db")) as c:
        yield from _promises(c, image, told)
        yield from history(c)
        yield from _staged(c, DataDir(data, data))


def migration(image: Path, told: Iterable[Told], before: int) -> Iterator[str]:
    """Every broken promise of an image that a newer artd may have begun to migrate, and then of that artd's next start. before:
    the last operation of the older one."""
    told, database = list(told), image / "data" / "artd.db"
    copy = backup_path(database, NOW)
    if schema_of(database) > NOW and not copy.exists():
        yield "the database is migrated, and there is no copy of the old one"
    if copy.exists():
        with closing(open_readonly(copy)) as c:
            sound = c.execute("PRAGMA integrity_check").fetchone()[0]
            if sound != "ok" or schema_of(copy) != NOW:
                yield f"the copy is of schema {schema_of(copy)}: {sound}"
            yield from _promises(c, image, [promise for promise in told if promise.sequence <= before])
    with released(), closing(connect(database)) as c:
        migrate(c)
        require_known(c)
        if half := c.execute("SELECT name FROM run WHERE note <> name").fetchall():
            yield f"the migration did not reach the runs {half}"
    yield from violations(image, told)


def schema_of(database: Path) -> int:
    with closing(open_readonly(database)) as c:
        return int(c.execute("PRAGMA user_version").fetchone()[0])


def _promises(c: sqlite3.Connection, image: Path, told: Iterable[Told]) -> Iterator[str]:
    for promise in told:
        if (text := _kept(c, image, promise)) is not None:
            yield f"{promise.kind} {promise.what} {promise.number}, told at operation {promise.sequence}: {text}"


def _has_schema(database: Path) -> bool:
    """A database that SQLite can read and that got as far as its first transaction."""
    if not database.exists():
        return False
    with closing(sqlite3.connect(database)) as c:
        return bool(c.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])


def _kept(c: sqlite3.Connection, image: Path, told: Told) -> str | None:
    """What is wrong with one promise; None for nothing."""
    match told.kind:
        case "run":
            found = c.execute("SELECT 1 FROM run WHERE name = ?", (told.what,)).fetchone()
        case "trajectory":
            found = c.execute("SELECT 1 FROM trajectory WHERE key = ? AND id = ?", (told.what, told.number)).fetchone()
        case "response":
            found = c.execute("SELECT 1 FROM exchange WHERE response_id = ?", (told.what,)).fetchone()
        case "step" | "served":
            found = c.execute(
                "SELECT 1 FROM checkpoint k JOIN run r ON r.id = k.run_id WHERE k.step = ? AND r.step >= k.step", (told.what,)
            ).fetchone()  # fmt: skip
        case "trained":  # a fence that a worker has seen is never given out again
            found = c.execute("SELECT 1 FROM job WHERE step = ? AND fence >= ?", (told.what, told.number)).fetchone()
        case "committed":
            found = c.execute("SELECT 1 FROM checkpoint WHERE sha = ?", (told.what,)).fetchone()
        case "backup":
            return _backup(image / told.what)
        case _:
            raise AssertionError(told.kind)
    return None if found else "is gone"


def _backup(folder: Path) -> str | None:
    try:
        backup.read_info(folder)
        report = check(folder, deep=True)
    except (backup.BackupError, sqlite3.DatabaseError, SchemaMismatch) as error:
        return str(error)
    return None if report.clean else backup.summarise(report)


def _staged(c: sqlite3.Connection, data: DataDir) -> Iterator[str]:
    """A manifest is written after what it lists, by whoever writes one: of a running job it tells of a whole result."""
    for job, fence in c.execute("SELECT id, fence FROM job WHERE state = 'running'"):
        folder = data.staging(job, fence)
        try:
            commit.verify(folder)
        except commit.BadResult as error:
            if "cannot be read" not in str(error):
                yield f"{folder.relative_to(data.root)} has a manifest and is not whole: {error}"
    if (data.root.parent / "backup" / backup.INFO).exists() and (text := _backup(data.root.parent / "backup")):
        yield f"a backup with {backup.INFO} is not whole: {text}"
