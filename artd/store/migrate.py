"""Migrates the database: runs numbered SQL files of `artd_schema.sql`, one transaction each, which `PRAGMA
user_version` counts.

Owns the schema, and the copy of the database that is made before a migration. The schema of a database is exactly the
result of the first `user_version` scripts (`meta.schema_draft` is their digest). A migration changes the database only
after its copy is durable, and refuses a newer schema. `meta.stored_form` is the digest of the Structs in the JSON and
msgpack columns; a form that this artd cannot read is refused too. Until the first release there is one script, 0001,
which is edited in place: a database of another draft is refused.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from contextlib import closing
from importlib.resources import files
from pathlib import Path

from artd_schema.crashpoint import reach
from artd_schema.data.stored import READABLE, form

from . import fs

Scripts = list[tuple[int, str]]
APPLICATION_ID = 0x61727464  # "artd"


class SchemaMismatch(Exception):
    """Another version of artd made the database."""


def scripts() -> Scripts:
    """Return (number, SQL) of every migration, in order."""
    folder = files("artd_schema").joinpath("sql")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(name[:4]), folder.joinpath(name).read_text(encoding="utf-8")) for name in names]


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema up to date, after a copy of the database beside it. Raises SchemaMismatch, and changes nothing then."""
    known = scripts()
    found = _version(connection)
    if found == 0:
        _create(connection, known, _draft(known))
        reach("schema.created")
        return
    _require_draft(connection, found, known)
    steps = [(number, sql) for number, sql in known if number > found]
    if steps:
        _back_up(connection, found)
        reach("migrate.backed_up")
    for number, sql in steps:
        _step(connection, number, sql, _draft(_up_to(known, number)))
        reach("migrate.done")
    if _form_of(connection) != form():
        connection.execute("UPDATE meta SET value = ? WHERE key = 'stored_form'", (form(),))


def require_known(connection: sqlite3.Connection) -> None:
    """Check that the database has exactly this artd's schema; change nothing. Raises SchemaMismatch when it has not."""
    known, found = scripts(), _version(connection)
    if found == 0:
        raise SchemaMismatch("the database holds no schema of artd: name a data folder of artd with --data-dir")
    _require_draft(connection, found, known)
    if found < known[-1][0]:
        raise SchemaMismatch(
            f"the database has schema {found}, this artd {known[-1][0]}: `artd start` migrates it (and keeps a copy), or use the "
            "artd that wrote it"
        )


def _require_draft(connection: sqlite3.Connection, found: int, known: Scripts) -> None:
    """Check that the database has exactly the first `found` scripts. Raises SchemaMismatch when it has not."""
    if found > known[-1][0]:
        raise SchemaMismatch(
            f"the database has schema {found}, this artd knows up to {known[-1][0]}: start the artd that wrote it, or a newer one"
        )
    stored = connection.execute("SELECT value FROM meta WHERE key = 'schema_draft'").fetchone()
    if stored is None or stored[0] != _draft(_up_to(known, found)):
        raise SchemaMismatch(
            "another unreleased draft of artd made the database (until 1.0 there are no migrations between drafts): "
            "start with an empty --data-dir, or with the artd that made it"
        )
    _require_form(connection)


def _require_form(connection: sqlite3.Connection) -> None:
    """Check that this artd can read the Structs in the rows and files. Raises SchemaMismatch when it cannot."""
    if _form_of(connection) not in {form(), *READABLE}:
        raise SchemaMismatch(
            "another version of artd wrote the specs, trajectories and manifests of this database, and this artd cannot read "
            "them: start the artd that wrote them, or start with an empty --data-dir"
        )


def _form_of(connection: sqlite3.Connection) -> str:
    row = connection.execute("SELECT value FROM meta WHERE key = 'stored_form'").fetchone()
    return str(row[0]) if row else ""


def backup_path(database: Path, version: int) -> Path:
    """Return the path of the copy that `migrate` makes of a database of schema `version`."""
    return database.with_name(f"{database.stem}-schema-{version:04d}.db")


def _back_up(connection: sqlite3.Connection, version: int) -> None:
    """Copy the database to `backup_path` durably, whole or not at all. Raises SchemaMismatch when it cannot be written."""
    database = Path(connection.execute("PRAGMA database_list").fetchone()[2])
    target = backup_path(database, version)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(partial)) as out:
            connection.backup(out)
            out.execute("PRAGMA journal_mode = DELETE")
        fs.fsync_file(partial)
        os.rename(partial, target)
        fs.fsync_dir(target.parent)
    except (OSError, sqlite3.Error) as error:
        partial.unlink(missing_ok=True)
        raise SchemaMismatch(
            f"the database needs a migration from schema {version}, and artd cannot write its copy {target}: {error}; nothing "
            "was changed. Next: free space, then artd start"
        ) from None


def _step(connection: sqlite3.Connection, number: int, sql: str, draft: str) -> None:
    """Run one script in one transaction, and check references at its end, since it may rebuild tables.

    Raises SchemaMismatch when the script fails; the database is unchanged then.
    """
    connection.execute("PRAGMA foreign_keys = OFF")
    try:
        connection.executescript(f"BEGIN IMMEDIATE;\n{sql}\n")
        if dangling := connection.execute("PRAGMA foreign_key_check").fetchall():
            raise sqlite3.IntegrityError(
                f"{len(dangling)} references point to missing rows, the first one in table {dangling[0][0]}"
            )
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_draft'", (draft,))
        connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise SchemaMismatch(
            f"migration {number} failed: {error}; the database is unchanged. Next: free space if the disk is full, else report it"
        ) from error
    finally:
        connection.execute("PRAGMA foreign_keys = ON")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _up_to(known: Scripts, number: int) -> Scripts:
    return [(n, sql) for n, sql in known if n <= number]


def _draft(known: Scripts) -> str:
    return hashlib.sha256("".join(sql for _, sql in known).encode()).hexdigest()


def _create(connection: sqlite3.Connection, known: Scripts, draft: str) -> None:
    body = "".join(sql for _, sql in known)
    connection.executescript(
        f"BEGIN IMMEDIATE;\n{body}\n"
        f"INSERT INTO meta (key, value) VALUES ('schema_draft', '{draft}'), ('stored_form', '{form()}');\n"
        f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {known[-1][0]};\nCOMMIT;"
    )
