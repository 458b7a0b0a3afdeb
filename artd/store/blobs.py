"""Stores content-addressed files in `blobs/ab/<sha256>`, and files without references in `blobs/.trash`.

Owns the `blobs` folder. The file comes first, its row second: only a committed `blob` row proves a file, so artd writes
a file without a row again in full. The bytes of a file always have the sha256 that its name says.

A row never points to a collected file, even when a put and a collection run at the same time:

- The row goes first. One transaction deletes a `blob` row without references (foreign keys refuse any other), and only
  after
  its COMMIT does the collection rename the file to the trash. A crash in between leaves a file without a row, which is no damage.
- Only the writer's thread inserts rows and renames files, so neither can happen between the other's check and its
  action: `trash` looks for the row right before it renames, and the function that inserts a row calls `missing` right before
  (if the file is missing, the sender must send it again, or packing must pack again).
- The collection leaves a put without a row alone for `GRACE_S`, so that in practice nobody has to repeat a put.
- A put never reads: it writes a new file and renames it over the old one, and its fsync of the folder makes an earlier
  rename to the trash durable too, so the order survives a power loss. The renames and unlinks of the collection need
  no fsync: after a power loss that undoes them, the next pass collects the file again.
- No row names a file in the trash. The pass after the one that moved it there unlinks it, so that a reader that learnt
  its name
  from a row just before the deletion can still open it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from . import fs

TRASH = ".trash"
_NAME = re.compile(r"(?P<folder>[0-9a-f]{2})/\.?(?P<sha>(?P=folder)[0-9a-f]{62})(\.\d+-\d+\.tmp)?")
"""The names of files that artd wrote; the collection leaves every other file alone."""
_FOLDER = re.compile(r"[0-9a-f]{2}")
GRACE_S = 600.0


def place(sha: str) -> str:
    """Return the path of a blob, relative to the folder of blobs."""
    return f"{sha[:2]}/{sha}"


class Blobs:
    """The blob files of one data folder. Its calls block: run them off the event loop.

    A process needs exactly one object, because the object remembers the puts whose rows are still to come.
    `monotonic` returns seconds. `born` is the time of this boot in seconds since the epoch; None means now.
    """

    def __init__(self, root: Path, monotonic: Callable[[], float] = time.monotonic, born: float | None = None) -> None:
        self.root = root
        self._monotonic = monotonic
        self._born = time.time() if born is None else born
        self._put_at: dict[str, float] = {}
        self._over: set[str] = set()
        fs.make_dir(root)

    def path(self, sha: str) -> Path:
        return self.root / place(sha)

    def put(self, data: bytes) -> str:
        """Write `data` durably. The caller inserts the row afterwards. Returns the sha256 in hex."""
        sha = hashlib.sha256(data).hexdigest()
        self._put_at[sha] = self._monotonic()
        target = self.path(sha)
        fs.make_dir(target.parent)
        fs.write_file(target, data)
        return sha

    def adopt(self, source: Path) -> tuple[str, int]:
        """Take over a file that another process wrote: hash it, fsync it, then rename it. Returns (sha256 in hex, bytes)."""
        sha, size = hash_file(source)
        self._put_at[sha] = self._monotonic()
        fs.fsync_file(source)
        fs.publish(source, self.path(sha))
        return sha, size

    def missing(self, shas: Iterable[str]) -> list[str]:
        """Return the shas without a file. The writer's thread calls this right before it inserts their rows."""
        return [sha for sha in shas if not self.path(sha).exists()]

    # ---- collection -------------------------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        """Return the names of the folders that hold blobs; the trash is not one of them."""
        found = _entries(self.root)
        return sorted(
            entry.name for entry in found if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )

    def files(self, folder: str) -> Iterator[tuple[str, int, bool]]:
        """Yield (name below the root, bytes, old) of every file in `folder` that artd wrote, temporary files of dead writers too.

        `old` means that the file is from before this boot, or that this process put it and no row came in time. Only an old file
        may go if no row ever named it.
        """
        for entry in _entries(self.root / folder):
            name = f"{folder}/{entry.name}"
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # a writer renamed its temporary file meanwhile
            if _NAME.fullmatch(name) is not None and stat.S_ISREG(found.st_mode):
                yield name, found.st_size, found.st_mtime < self._born or owner(name) in self._over

    def forget_old_puts(self) -> None:
        """End the protection of puts that are older than `GRACE_S`: the next pass may collect those without a row."""
        end = self._monotonic() - GRACE_S
        for sha in [sha for sha, at in self._put_at.copy().items() if at <= end]:
            self._put_at.pop(sha, None)
            self._over.add(sha)

    def end_pass(self) -> None:
        """Forget the unprotected puts after a pass has looked at them: the files that remain have a row."""
        self._over.clear()

    def being_put(self, name: str) -> bool:
        """Return whether this process put a file (or its temporary file) so recently that its row may still come."""
        return owner(name) in self._put_at

    def trash(self, c: sqlite3.Connection, names: Iterable[str]) -> set[str]:
        """Move files without a row to the trash. The writer's thread calls this. Returns the names of the moved files."""
        moved = set()
        fs.make_dir(self.root / TRASH)
        for name in names:
            known = c.execute("SELECT 1 FROM blob WHERE sha = ?", (owner(name),)).fetchone()
            if (known is not None and name == place(owner(name))) or self.being_put(name):
                continue
            try:
                os.rename(self.root / name, self.root / TRASH / Path(name).name)
            except FileNotFoundError:
                continue
            moved.add(name)
        return moved

    def list_trash(self) -> list[tuple[Path, int]]:
        """Return (path, bytes) of every file in the trash."""
        found = [
            entry for entry in _entries(self.root / TRASH) if _NAME.fullmatch(f"{owner(entry.name)[:2]}/{entry.name}")
        ]
        return [(Path(entry.path), entry.stat().st_size) for entry in found if entry.is_file(follow_symlinks=False)]


def owner(name: str) -> str:
    """Return the sha256 that the name of a blob's file holds: `ab/SHA` or, for a temporary file, `ab/.SHA.PID-N.tmp`."""
    return name.rpartition("/")[2].lstrip(".").partition(".")[0]


def hash_file(path: Path) -> tuple[str, int]:
    """Return (sha256 in hex, bytes) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size


def add_row(connection: sqlite3.Connection, sha: str, size: int, kind: str, now: int) -> None:
    """Insert the row of a blob. The caller has called `missing` in the same transaction."""
    connection.execute(
        "INSERT INTO blob (sha, bytes, kind, created) VALUES (?, ?, ?, ?) ON CONFLICT (sha) DO NOTHING",
        (sha, size, kind, now),
    )


def delete_row(connection: sqlite3.Connection, sha: str) -> None:
    """Delete a row; the caller has seen in this transaction that nothing refers to it."""
    connection.execute("DELETE FROM blob WHERE sha = ?", (sha,))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
