"""store.migrate: a new file gets the whole schema; an older one is migrated after a backup; another draft's is refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from artd.check.run import check
from artd.store import fs
from artd.store.migrate import APPLICATION_ID, SchemaMismatch, backup_path, migrate, require_known, scripts
from artd.store.writer import connect
from artd_schema.crashpoint import VARIABLE
from tests.fakes.world import template
from tests.fixtures.schema import make
from tests.fixtures.schema.next import SCRIPT as NEXT
from tests.fixtures.schema.next import released

ROOT = Path(__file__).parents[2]
AFTER = "CREATE TABLE extra (id INTEGER PRIMARY KEY) STRICT;"


@pytest.fixture
def connection(tmp_path):
    found = connect(tmp_path / "artd.db")
    yield found
    found.close()


def test_a_new_file_gets_the_schema_once(connection):
    migrate(connection)
    assert connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    assert connection.execute("PRAGMA user_version").fetchone()[0] == scripts()[-1][0]
    before = connection.execute("SELECT group_concat(sql) FROM sqlite_schema").fetchone()[0]
    migrate(connection)
    assert connection.execute("SELECT group_concat(sql) FROM sqlite_schema").fetchone()[0] == before
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_every_table_is_strict(connection):
    migrate(connection)
    tables = connection.execute("SELECT name, strict FROM pragma_table_list WHERE schema = 'main'").fetchall()
    loose = [row["name"] for row in tables if not row["strict"] and not row["name"].startswith("sqlite_")]
    assert len(tables) > 10 and loose == []


def test_a_newer_schema_is_refused(connection):
    migrate(connection)
    connection.execute("PRAGMA user_version = 9999")
    with pytest.raises(SchemaMismatch, match="schema 9999"):
        migrate(connection)


def test_another_draft_is_refused(connection):
    migrate(connection)
    connection.execute("UPDATE meta SET value = 'other' WHERE key = 'schema_draft'")
    with pytest.raises(SchemaMismatch, match="another unreleased draft"):
        migrate(connection)


def test_a_failed_migration_leaves_nothing(connection, monkeypatch):
    monkeypatch.setattr(
        "artd.store.migrate.scripts", lambda: [(1, "CREATE TABLE meta (key TEXT, value TEXT); CREATE TABLE meta (a);")]
    )
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection)
    connection.rollback()
    assert connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    assert connection.execute("PRAGMA user_version").fetchone()[0] == 0


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO run (name, spec, base_digest, base_manifest, vocab_size, state, created) "
        "VALUES ('r', x'', '', x'', 1, 'bogus', 0)",
        "INSERT INTO job (run_id, kind, step, epoch, state, created) VALUES (1, 'init', 0, 0, 'running', 0)",
        "INSERT INTO job (run_id, kind, step, epoch, state, created) VALUES (1, 'train', 0, 0, 'queued', 0)",
        "INSERT INTO process (name, kind, state, boot, since) VALUES ('x', 'trainer', 'asleep', 1, 0)",
    ],
)
def test_checks_refuse_what_the_core_never_writes(connection, sql):
    migrate(connection)
    with pytest.raises(sqlite3.IntegrityError, match="CHECK|constraint"):
        connection.execute(sql)


def test_each_run_has_a_trainer_of_its_own_and_a_trainer_has_one_job(connection):
    migrate(connection)
    run = "INSERT INTO run (name, spec, base_digest, base_manifest, vocab_size, state, created) VALUES (?, x'', '', x'', 1, 'active', 0)"
    connection.executemany(run, [("a",), ("b",)])
    job = (
        "INSERT INTO job (run_id, kind, step, epoch, state, worker, created) VALUES (?, 'init', 0, 0, 'running', ?, 0)"
    )
    connection.executemany(job, [(1, "trainer-1"), (2, "trainer-2")])
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(job, (2, "trainer-1"))


# ---- an older schema ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The fixture of the present schema, made as at a release."""
    return make.write(tmp_path_factory.mktemp("schema"), template())


@pytest.fixture
def old(packed, tmp_path):
    """A data folder of the last schema, once the artd that opens it knows newer ones (`newer`)."""
    return make.load(packed, tmp_path / "data")


@pytest.fixture
def newer():
    with ExitStack() as releases:
        yield lambda *more: releases.enter_context(released(*more))


def version(path):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as c:
        return c.execute("PRAGMA user_version").fetchone()[0]


def opened(path):
    with closing(connect(path)) as c:
        migrate(c)
        require_known(c)
        return c.execute("SELECT group_concat(name) FROM pragma_table_info('run')").fetchone()[0]


def rows(path):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as c:
        return [line for line in c.iterdump() if line.startswith("INSERT")]


def test_an_older_database_is_copied_and_then_migrated(old, newer):
    database, number = old / "artd.db", scripts()[-1][0]
    before = rows(database)
    newer(NEXT, AFTER)
    with closing(connect(database)) as c, pytest.raises(SchemaMismatch, match="`artd start` migrates it"):
        require_known(c)
    assert "note" in opened(database) and version(database) == number + 2
    copy = backup_path(database, number)
    assert version(copy) == number and rows(copy) == before and copy.stat().st_mode & 0o777 == 0o600
    assert check(old, deep=True).clean
    copy.unlink()
    assert "note" in opened(database) and not copy.exists()  # nothing is left to do


def test_every_released_schema_can_be_migrated(tmp_path, packed, newer):
    released = [*sorted((ROOT / "tests/fixtures/schema").glob("*.tar.gz")), packed]
    for source in released:
        folder = make.load(source, tmp_path / source.name)
        opened(folder / "artd.db")
        assert check(folder, deep=True).clean, source


def test_a_migration_that_fails_leaves_the_database_as_it_was(old, newer):
    database, number = old / "artd.db", scripts()[-1][0]
    before = rows(database)
    for bad, text in (
        (f"{NEXT} SELECT missing FROM run;", "no such column"),
        ("DELETE FROM run;", "references point to missing rows"),
    ):
        newer(bad)
        with pytest.raises(SchemaMismatch, match=f"migration {number + 1} failed: .*{text}"):
            opened(database)
        assert version(database) == number and rows(database) == before
    newer(NEXT)
    assert "note" in opened(database)  # the reference check is on again, and the next try is like the first


def test_without_room_for_the_copy_nothing_is_changed(old, newer, monkeypatch):
    database, number = old / "artd.db", scripts()[-1][0]
    before = rows(database)
    newer(NEXT)

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(fs, "fsync_file", full)
        with pytest.raises(SchemaMismatch, match="No space left on device; nothing was changed. Next: free space"):
            opened(database)
    assert version(database) == number and rows(database) == before
    assert not [path for path in old.iterdir() if "schema" in path.name]
    assert "note" in opened(database)


def test_the_copy_is_durable_before_anything_changes(old, newer, monkeypatch):
    database, number = old / "artd.db", scripts()[-1][0]
    steps: list[str] = []
    newer(NEXT)
    for name in ("fsync_file", "fsync_dir"):
        real = getattr(fs, name)
        monkeypatch.setattr(
            fs, name, lambda path, name=name, real=real: (steps.append(f"{name} {version(database)}"), real(path))
        )
    opened(database)
    assert steps == [f"fsync_file {number}", f"fsync_dir {number}"]


@pytest.mark.parametrize("point", ["migrate.backed_up", "migrate.done"])
def test_a_crash_around_a_migration_is_cured_by_the_next_start(old, newer, tmp_path, point):
    database, number = old / "artd.db", scripts()[-1][0]
    before = rows(database)
    (tmp_path / point).write_text("kill")
    code = f"""
from artd.store.migrate import migrate
from artd.store.writer import connect
from tests.fixtures.schema.next import released
with released():
    migrate(connect({str(database)!r}))
"""
    env = os.environ | {VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert version(database) == number + (point == "migrate.done") and rows(backup_path(database, number)) == before
    newer(NEXT)
    assert "note" in opened(database) and check(old, deep=True).clean
