"""Opens a read-only connection to the database, while the daemon runs or not.

With `mode=ro` no row changes through the connection. It reads the write-ahead log but never checkpoints it; only the
writer does.
"""

from __future__ import annotations

import sqlite3
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_readonly(path: Path, timeout_s: float = 5.0, shared: bool = False) -> sqlite3.Connection:
    """Open the database of a data folder or a backup. With `shared` another thread may close the connection.

    Raises sqlite3.DatabaseError when the database cannot be read.
    """
    uri = f"file:{urllib.parse.quote(str(path))}?mode=ro"
    try:
        return _open(uri, timeout_s, shared)
    except sqlite3.OperationalError:
        # WAL mode needs a -shm file. If SQLite can neither open nor create one and there is no WAL, nobody writes.
        if not path.exists() or Path(f"{path}-wal").exists():
            raise
        return _open(f"{uri}&immutable=1", timeout_s, shared)


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Let every read of the `with` block see the same rows. If a transaction is open already, join it."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.rollback()


def _open(uri: str, timeout_s: float, shared: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=not shared)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection
