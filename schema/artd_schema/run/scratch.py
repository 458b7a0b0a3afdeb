"""Scratch files of processes that may be killed: recorded while they live, removed once they are proven dead.

What an engine leaves in /dev/shm and /tmp outlives a kill of the engine, of its harness and of the daemon alike, so
whoever comes next finds it in a record. Owns the record's form, one `INODE PATH` a line. Only a file that bears a name
of Python's, torch's or an engine's own scratch, and still is the recorded inode, is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .engines import ENGINES

_OF_ENGINES = [re.escape(prefix) for engine in ENGINES.values() for prefix in engine.scratch]
SCRATCH = re.compile(rf"/(dev/shm|tmp)/({'|'.join(['psm_', 'sem[.]mp-', 'torch_', *_OF_ENGINES])})[^/]*")


def remove(paths: Iterable[Path]) -> None:
    """Unlink files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def record(paths: Iterable[Path], file: Path) -> None:
    """Write the list of scratch files, with their inodes, for `sweep` of a later process."""
    lines = []
    for path in sorted(paths):
        try:
            lines.append(f"{path.lstat().st_ino} {path}\n")
        except FileNotFoundError:
            continue
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text("".join(lines))
    temporary.replace(file)


def sweep(file: Path) -> list[Path]:
    """Remove the recorded files that are still there, and the record; returns them. A name that was taken anew is left."""
    found = []
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        inode, _, name = line.partition(" ")
        path = Path(name)
        if SCRATCH.fullmatch(name) and path.exists() and str(path.lstat().st_ino) == inode:
            found.append(path)
    remove(found)
    file.unlink(missing_ok=True)
    return found
