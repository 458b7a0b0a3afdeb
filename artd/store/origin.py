"""Refuses a write-ahead log that belongs to another database file, before SQLite replays it.

Owns the table `origin`, and the tokens in the marker file DATA/artd.folder. The token has a database page of its own,
which artd writes only at boot and in place, so that it can be read without SQLite while a checkpoint has folded only
part of the log into the file. The marker names a token before the database file can hold it. A folder without a marker
(a backup, a test) is not checked.
"""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
from pathlib import Path
from typing import Any

from artd_schema.paths import MARKER

from . import fs
from .room import is_full
from .writer import fold

log = logging.getLogger(__name__)
ROLLBACK = b"\1\1"
"""The format versions in the header of a database without a write-ahead log; artd writes backups in this form."""


class ForeignLog(Exception):
    """The write-ahead log belongs to another database."""


def require_own_log(database: Path) -> None:
    """Check that the log beside `database` belongs to it. Call it before SQLite opens the file; it changes nothing.

    Raises ForeignLog when the log belongs to another database.
    """
    wal = Path(f"{database}-wal")
    if not _holds_bytes(wal) or not _holds_bytes(database) or _holds_bytes(Path(f"{database}-journal")):
        return
    marker = _read_marker(database)
    with database.open("rb") as file:
        header = file.read(100)
        foreign = header[18:20] == ROLLBACK
        if not foreign and marker.get("tokens"):
            size = int.from_bytes(header[16:18], "big")
            size = 65536 if size == 1 else size
            file.seek((marker["page"] - 1) * size)
            page = file.read(size)
            foreign = not any(token.encode() in page for token in marker["tokens"])
    if foreign:
        raise ForeignLog(
            f"the write-ahead log {wal.name} does not belong to {database}: one of the two was copied here. Next: artd restore "
            f"BACKUP --data-dir NEW; or put the right {database.name} back"
        )


def mark(connection: sqlite3.Connection, database: Path) -> None:
    """Give the database a new token. The caller has folded the whole log into the database."""
    found = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'origin'").fetchone()
    if found is None or not (database.parent / MARKER).exists():
        return
    (page,), new = found, secrets.token_hex(16)
    row = connection.execute("SELECT token FROM origin").fetchone()
    try:
        _write_marker(database, page, [row[0], new] if row else [])
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "INSERT INTO origin (id, token) VALUES (1, ?) ON CONFLICT (id) DO UPDATE SET token = ?", (new, new)
        )
        connection.execute("COMMIT")
        if fold(connection, "TRUNCATE", database.parent) or fold(connection, "PASSIVE", database.parent):
            _write_marker(database, page, [new])
    except (OSError, sqlite3.OperationalError) as error:
        if not fs.is_full(error) and not is_full(error, database.parent):
            raise
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        log.warning("the disk has no room for a new database token, so the token of an older boot stays: %s", error)


def _holds_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _read_marker(database: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((database.parent / MARKER).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _write_marker(database: Path, page: int, tokens: list[str]) -> None:
    fs.write_file(database.parent / MARKER, json.dumps({"page": page, "tokens": tokens}).encode())
