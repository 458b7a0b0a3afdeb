"""Content-addressed files: `blobs/ab/<sha256>`, and `blobs/.trash`, where those go that nothing refers to.

Owner of: the `blobs` folder. Invariants: file first, row second: only a committed `blob` row proves a file, so
without one the file is written again in full; a name holds exactly the bytes it is the sha256 of.

Why a row never points to a file that was collected, whatever is put at the same time:

- Rows go first. A `blob` row that nothing refers to is deleted in one transaction (foreign keys refuse any other), and only after
  its COMMIT may the file be renamed to the trash. A crash in between leaves a file without a row, which is no damage.
- Rows are inserted and files are renamed in the writer's thread alone, so neither can come between the other's look and
  its act: `trash` looks for the row right before it renames, and whoever inserts a row asks `missing` for the file right
  before (it is asked to send or pack again if the file has gone).
- A put whose row has not come yet is left alone for `GRACE_S`, so that in practice nobody has to do anything again.
- A put never reads: it writes a new file and renames it over whatever is there, and its fsync of the folder makes an earlier
  rename to the trash durable too, so the order survives a power loss. The renames and unlinks of the collection need
  no fsync: if they are lost, the file is collected again.
- A file in the trash is nobody's name any more. It is unlinked by a later pass than the one that put it there, for those who
  learnt its name from a row just before it went and open it now.
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
"""Names that artd alone makes."""
_FOLDER = re.compile(r"[0-9a-f]{2}")
GRACE_S = 600.0


def place(sha: str) -> str:
    """Where a blob lies, relative to the folder of blobs."""
    return f"{sha[:2]}/{sha}"


class Blobs:
    """Blocking calls; run them off the event loop. One object serves all of a process, because it knows what is being put.
    monotonic: seconds; born: time of this boot in seconds since the epoch, None for now."""

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
        """Write `data` durably; returns its sha256 in hex. The row comes after."""
        sha = hashlib.sha256(data).hexdigest()
        self._put_at[sha] = self._monotonic()
        target = self.path(sha)
        fs.make_dir(target.parent)
        fs.write_file(target, data)
        return sha

    def adopt(self, source: Path) -> tuple[str, int]:
        """Take over a file that somebody else wrote: hash and fsync it here, then rename. Returns (sha, bytes)."""
        sha, size = hash_file(source)
        self._put_at[sha] = self._monotonic()
        fs.fsync_file(source)
        fs.publish(source, self.path(sha))
        return sha, size

    def missing(self, shas: Iterable[str]) -> list[str]:
        """Those whose file is not there. Called in the writer, before their rows are inserted."""
        return [sha for sha in shas if not self.path(sha).exists()]

    # ---- what the collection does -----------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        """Names of the folders of files, without the trash."""
        found = _entries(self.root)
        return sorted(
            entry.name for entry in found if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )

    def files(self, folder: str) -> Iterator[tuple[str, int, bool]]:
        """(name below the root, bytes, old) of every file of a folder that bears a name of artd's, those of dead writers too. old:
        it is from before this boot, or this process put it and no row came; only then may one that no row ever named go."""
        for entry in _entries(self.root / folder):
            name = f"{folder}/{entry.name}"
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # a temporary file that has its name now
            if _NAME.fullmatch(name) is not None and stat.S_ISREG(found.st_mode):
                yield name, found.st_size, found.st_mtime < self._born or owner(name) in self._over

    def forget_old_puts(self) -> None:
        """Puts from before the grace are over, with a row or without: the next pass may collect them."""
        end = self._monotonic() - GRACE_S
        for sha in [sha for sha, at in self._put_at.copy().items() if at <= end]:
            self._put_at.pop(sha, None)
            self._over.add(sha)

    def end_pass(self) -> None:
        """Puts that were over have been looked at: those that are still there have a row."""
        self._over.clear()

    def being_put(self, name: str) -> bool:
        """Whether a file (or its temporary name) was put so lately that its row may still come."""
        return owner(name) in self._put_at

    def trash(self, c: sqlite3.Connection, names: Iterable[str]) -> set[str]:
        """In the writer: move files that have no row out of the way; which."""
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

    def trashed(self) -> list[tuple[Path, int]]:
        """What lies in the trash, with bytes."""
        found = [
            entry for entry in _entries(self.root / TRASH) if _NAME.fullmatch(f"{owner(entry.name)[:2]}/{entry.name}")
        ]
        return [(Path(entry.path), entry.stat().st_size) for entry in found if entry.is_file(follow_symlinks=False)]


def owner(name: str) -> str:
    """The sha256 that a file below the folder of blobs has or is going to have: `ab/SHA` or `ab/.SHA.PID.tmp`."""
    return name.rpartition("/")[2].lstrip(".").partition(".")[0]


def hash_file(path: Path) -> tuple[str, int]:
    """(sha256 in hex, bytes)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size


def add_row(connection: sqlite3.Connection, sha: str, size: int, kind: str, now: int) -> None:
    """The caller has asked `missing` in this transaction."""
    connection.execute(
        "INSERT INTO blob (sha, bytes, kind, created) VALUES (?, ?, ?, ?) ON CONFLICT (sha) DO NOTHING",
        (sha, size, kind, now),
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
