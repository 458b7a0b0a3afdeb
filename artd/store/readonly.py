"""A read-only connection to the database, with the daemon up or down.

Owner of: nothing. Invariants: `mode=ro`: no row changes through it; the WAL is read, never folded in: only the writer
checkpoints.
"""

from __future__ import annotations

import sqlite3
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_readonly(path: Path, timeout_s: float = 5.0, shared: bool = False) -> sqlite3.Connection:
    """Open the database of a data folder or a backup. shared: another thread may close it. Errors: sqlite3.DatabaseError when it cannot be read."""
    uri = f"file:{urllib.parse.quote(str(path))}?mode=ro"
    try:
        return _opened(uri, timeout_s, shared)
    except sqlite3.OperationalError:
        # WAL needs its -shm file; where that can neither be opened nor made, and there is no WAL, nobody writes.
        if not path.exists() or Path(f"{path}-wal").exists():
            raise
        return _opened(f"{uri}&immutable=1", timeout_s, shared)


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Every read within sees the same rows; part of a transaction that is open already."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.rollback()


def _opened(uri: str, timeout_s: float, shared: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=not shared)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection
