"""Knows which SQLite versions have the WAL-reset bug.

artd is safe even with the bug: only the writer's connection ever checkpoints, and every other connection is read-only
(tests/daemon/test_wal.py).
"""

from __future__ import annotations

BUG = (
    "has the WAL-reset bug of SQLite 3.7.0 to 3.51.2 (it needs two connections that checkpoint; artd lets only its writer do "
    "so, and nobody else may write to the database)"
)
REMEDY = "a Python linked with SQLite 3.51.3 or later"


def wal_reset_bug(version: str) -> bool:
    """Return whether an SQLite version can lose a commit when a checkpoint resets the WAL under a second connection."""
    return (3, 7, 0) <= tuple(int(part) for part in version.split(".")[:3]) <= (3, 51, 2)
