"""A read-only connection to the database, with the daemon up or down.

Owner of: nothing. Invariants: `mode=ro`: no row changes through it; the WAL is read, never folded in: only the writer
checkpoints.
"""

from __future__ import annotations

import sqlite3
import urllib.parse
from pathlib import Path


def open_readonly(path: Path, timeout_s: float = 5.0) -> sqlite3.Connection:
    """Open the database of a data folder or a backup. Errors: sqlite3.DatabaseError when it cannot be read."""
    uri = f"file:{urllib.parse.quote(str(path))}?mode=ro"
    try:
        return _opened(uri, timeout_s)
    except sqlite3.OperationalError:
        # WAL needs its -shm file; where that can neither be opened nor made, and there is no WAL, nobody writes.
        if not path.exists() or Path(f"{path}-wal").exists():
            raise
        return _opened(f"{uri}&immutable=1", timeout_s)


def _opened(uri: str, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection
