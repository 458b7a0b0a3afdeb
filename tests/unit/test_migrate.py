"""store.migrate: a new file gets the whole schema; another draft's file is refused."""

from __future__ import annotations

import sqlite3

import pytest

from artd.store.migrate import APPLICATION_ID, SchemaMismatch, migrate, scripts
from artd.store.writer import connect


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


def test_one_run_is_active_at_a_time(connection):
    migrate(connection)
    sql = "INSERT INTO run (name, spec, base_digest, base_manifest, vocab_size, state, created) VALUES (?, x'', '', x'', 1, ?, 0)"
    connection.execute(sql, ("a", "finished"))
    connection.execute(sql, ("b", "active"))
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(sql, ("c", "paused"))
