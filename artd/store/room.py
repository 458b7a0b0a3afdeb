"""Tells whether an SQLite error means that the disk has no room.

Owns the time when each folder was last found full. SQLite reports "full" only for ENOSPC in a write. It reports an
exceeded quota, and a file that it cannot create or grow, as I/O errors; for those this module tries to write a small
file. An fsync error never counts as a full disk, because after it nobody knows what is durable.
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
"""How long a folder counts as full: the disk may get room between the error and the test of it."""
_full_at: dict[Path, float] = {}


def is_full(error: BaseException | None, folder: Path | None) -> bool:
    """Return whether an error means that the disk has no room. `folder` is the database's folder; with None only the error
    itself decides."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL:
        return True
    if code not in UNCLEAR or folder is None:
        return False
    if fs.refusal(folder) is not None:
        _full_at[folder] = time.monotonic()
    return time.monotonic() - _full_at.get(folder, float("-inf")) < RECENT_S
