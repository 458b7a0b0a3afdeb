"""Migrations: numbered SQL files of `artd_schema.sql`, one transaction each, counted by `PRAGMA user_version`.

Until the first release there is one file, 0001, edited in place: a database of another draft is refused, not guessed
at.
"""

from __future__ import annotations

import hashlib
import sqlite3
from importlib.resources import files

from artd_schema.crashpoint import reach

APPLICATION_ID = 0x61727464  # "artd"


class SchemaMismatch(Exception):
    """The database was made by another version of artd."""


def scripts() -> list[tuple[int, str]]:
    """(number, SQL) of every migration, in order."""
    folder = files("artd_schema").joinpath("sql")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(name[:4]), folder.joinpath(name).read_text(encoding="utf-8")) for name in names]


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema up to date. Errors: SchemaMismatch."""
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        known = scripts()
        _create(connection, known, _draft(known))
        reach("schema.created")
        return
    require_known(connection)


def require_known(connection: sqlite3.Connection) -> None:
    """Errors: SchemaMismatch unless the database is of this very schema; nothing is changed."""
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    known = scripts()
    if found == 0:
        raise SchemaMismatch("the database holds no schema of artd")
    if found > known[-1][0]:
        raise SchemaMismatch(
            f"the database has schema {found}, this artd knows up to {known[-1][0]}: start the artd that wrote it, or a newer one"
        )
    stored = connection.execute("SELECT value FROM meta WHERE key = 'schema_draft'").fetchone()
    if stored is None or stored[0] != _draft(known):
        raise SchemaMismatch(
            "the database was made by another unreleased draft of artd (until 1.0 there are no migrations between drafts): "
            "start with an empty --data-dir, or with the artd that made it"
        )


def _draft(known: list[tuple[int, str]]) -> str:
    return hashlib.sha256("".join(sql for _, sql in known).encode()).hexdigest()


def _create(connection: sqlite3.Connection, known: list[tuple[int, str]], draft: str) -> None:
    body = "".join(sql for _, sql in known)
    connection.executescript(
        f"BEGIN IMMEDIATE;\n{body}\n"
        f"INSERT INTO meta (key, value) VALUES ('schema_draft', '{draft}');\n"
        f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {known[-1][0]};\nCOMMIT;"
    )
