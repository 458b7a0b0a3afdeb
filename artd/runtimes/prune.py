"""Finds and deletes runtimes that nothing uses any more.

A folder is deleted under its install's lock, when no process of this account has a file of it mapped or on its command line and
no setting names an interpreter in it. Its marker goes first.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import lockfile, paths


@dataclass(frozen=True)
class Row:
    """A runtime's folder. `kept`: why it stays, "" for one that goes or has gone."""

    path: str
    size_bytes: int
    kept: str = ""


def prune(everything: bool, dry: bool, named: Sequence[str] = ()) -> list[Row]:
    """Delete unused runtimes. `everything`: also those of this artd; `dry`: only look; `named`: interpreters of the settings."""
    current = {lock.folder_name for lock in lockfile.list_shipped()}
    rows = []
    for folder in sorted(paths.runtimes_root().glob("*-py3*-*")):
        half_made = not (folder / paths.MARKER).is_file()
        if folder.is_dir() and (everything or half_made or folder.name not in current):
            rows.append(_one(folder, dry, named))
    return rows


def _one(folder: Path, dry: bool, named: Sequence[str]) -> Row:
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    handle = os.open(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Row(str(folder), size, "an install is running")
        if any(name.startswith(f"{folder}/") for name in named):
            return Row(str(folder), size, "artd.toml names its interpreter")
        if user := next(_users(folder), 0):
            return Row(str(folder), size, f"process {user} runs in it")
        if not dry:
            (folder / paths.MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder)
    finally:
        os.close(handle)
    return Row(str(folder), size)


def _users(folder: Path) -> Iterator[int]:
    """Yield the processes of this account that have a file of the folder mapped, or name it on their command line."""
    within = f"{folder}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "maps"):
            try:
                if within in (entry / name).read_bytes():
                    yield int(entry.name)
                    break
            except OSError:
                break  # it ended, or is another account's
