"""Content-addressed files: `blobs/ab/<sha256>`.

Owner of: the `blobs` folder. Invariants: file first, row second: only a committed `blob` row proves a file, so
without one the file is written again in full; a name holds exactly the bytes it is the sha256 of.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

from . import fs


def place(sha: str) -> str:
    """Where a blob lies, relative to the folder of blobs."""
    return f"{sha[:2]}/{sha}"


class Blobs:
    """Blocking calls; run them off the event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        fs.make_dir(root)

    def path(self, sha: str) -> Path:
        return self.root / place(sha)

    def put(self, data: bytes) -> str:
        """Write `data` durably; returns its sha256 in hex. The row comes after."""
        sha = hashlib.sha256(data).hexdigest()
        target = self.path(sha)
        fs.make_dir(target.parent)
        fs.write_file(target, data)
        return sha

    def adopt(self, source: Path) -> tuple[str, int]:
        """Take over a file that somebody else wrote: hash and fsync it here, then rename. Returns (sha, bytes)."""
        sha, size = hash_file(source)
        fs.fsync_file(source)
        fs.publish(source, self.path(sha))
        return sha, size


def hash_file(path: Path) -> tuple[str, int]:
    """(sha256 in hex, bytes)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size


def add_row(connection: sqlite3.Connection, sha: str, size: int, kind: str, now: int) -> None:
    connection.execute(
        "INSERT INTO blob (sha, bytes, kind, created) VALUES (?, ?, ?, ?) ON CONFLICT (sha) DO NOTHING",
        (sha, size, kind, now),
    )
