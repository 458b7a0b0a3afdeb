"""A write-ahead log belongs to one database file: any other one that lies beside it is refused before SQLite replays it.

Owner of: the table `origin`, and what DATA/artd.folder says of it. Invariants: the token lies in a page of its own, which is written at
boots alone and in place, so that it can be read without SQLite while the rest of the file is half folded in; the marker
names every token that the file may have, before it has it. A folder without a marker (a backup, a test) is not looked at.
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
"""Versions in the header of a database that no log belongs to: artd writes backups so."""


class ForeignLog(Exception):
    """The database is not the one that the log belongs to."""


def require_own_log(database: Path) -> None:
    """Errors: ForeignLog; nothing is changed. SQLite has not opened the file yet."""
    wal = Path(f"{database}-wal")
    if not _holds_bytes(wal) or not _holds_bytes(database) or _holds_bytes(Path(f"{database}-journal")):
        return
    told = _told(database)
    with database.open("rb") as file:
        header = file.read(100)
        foreign = header[18:20] == ROLLBACK
        if not foreign and told.get("tokens"):
            size = int.from_bytes(header[16:18], "big")
            size = 65536 if size == 1 else size
            file.seek((told["page"] - 1) * size)
            page = file.read(size)
            foreign = not any(token.encode() in page for token in told["tokens"])
    if foreign:
        raise ForeignLog(
            f"{database} is not the database that {wal.name} belongs to: one of the two was copied here. Next: artd restore BACKUP "
            f"--data-dir NEW; or put the right {database.name} back"
        )


def mark(connection: sqlite3.Connection, database: Path) -> None:
    """Give the database a new token. Its whole log has been folded in."""
    found = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'origin'").fetchone()
    if found is None or not (database.parent / MARKER).exists():
        return
    (page,), new = found, secrets.token_hex(16)
    row = connection.execute("SELECT token FROM origin").fetchone()
    try:
        _tell(database, page, [row[0], new] if row else [])
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "INSERT INTO origin (id, token) VALUES (1, ?) ON CONFLICT (id) DO UPDATE SET token = ?", (new, new)
        )
        connection.execute("COMMIT")
        if fold(connection, "TRUNCATE", database.parent) or fold(connection, "PASSIVE", database.parent):
            _tell(database, page, [new])
    except (OSError, sqlite3.OperationalError) as error:
        if not fs.is_full(error) and not is_full(error, database.parent):
            raise
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        log.warning("the database keeps its token of an older boot: %s", error)


def _holds_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _told(database: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((database.parent / MARKER).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _tell(database: Path, page: int, tokens: list[str]) -> None:
    fs.write_file(database.parent / MARKER, json.dumps({"page": page, "tokens": tokens}).encode())
