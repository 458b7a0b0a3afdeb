"""Whether an error of SQLite means that there is no room.

Owner of: when a folder was last seen full. Invariants: SQLite says "full" for ENOSPC in a write alone; a quota, and whatever keeps it from making or
growing a file, are I/O errors to it, so that a small file decides; an error of fsync is never taken for a full disk, because
what is durable is unknown then.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from . import fs

UNCLEAR = (
    sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_CANTOPEN,
)  # fmt: skip
RECENT_S = 2.0
"""Room may come between the error and the look at it."""
_full_at: dict[Path, float] = {}


def is_full(error: BaseException | None, folder: Path | None) -> bool:
    """folder: of the database, None to ask only what the error itself says."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL:
        return True
    if code not in UNCLEAR or folder is None:
        return False
    if fs.refusal(folder) is not None:
        _full_at[folder] = time.monotonic()
    return time.monotonic() - _full_at.get(folder, float("-inf")) < RECENT_S
