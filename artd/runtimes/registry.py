"""Finds the installed runtimes: reads and writes markers, `find` for the supervisor, `list_runtimes` for `artd runtime list`.

A folder without a valid marker never counts as a runtime. The marker is written last, with fsync.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import lockfile, paths
from .lockfile import Lock


class RuntimeMissing(Exception):
    """The runtime is not installed; the text holds the exact command to type."""


@dataclass(frozen=True)
class Runtime:
    python: Path
    site_paths: list[str] = field(default_factory=list)  # to be added to PYTHONPATH
    versions: dict[str, str] = field(default_factory=dict)
    root: Path | None = None


@dataclass(frozen=True)
class Marker:
    digest: str
    python: str
    seconds: float
    size_bytes: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Listed:
    name: str  # folder name
    state: str  # ready | missing | half-made | stale
    path: str
    size_bytes: int
    versions: dict[str, str]
    next: str


def command_for(lock: Lock) -> str:
    if lock.stem == lockfile.OVERLAY:
        return "artd runtime install megatron --cpu --test-overlay"
    name, _, device = lock.stem.rpartition("-")
    return f"artd runtime install {name} --{device}"


def folder_of(lock: Lock) -> Path:
    return paths.runtimes_root() / lock.folder_name


def write_marker(folder: Path, marker: Marker) -> None:
    """Write the marker durably: the last act of an install."""
    temporary = folder / (paths.MARKER + ".tmp")
    with open(temporary, "w") as out:
        json.dump(asdict(marker), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(folder / paths.MARKER)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_marker(folder: Path, digest: str) -> Marker | None:
    """Return the marker of a complete folder that was made from this lock and whose interpreter exists, else None."""
    try:
        marker = Marker(**json.loads((folder / paths.MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    if marker.digest != digest or shutil.which(marker.python) is None:
        return None
    return marker


def find(name: str, device: str = "cpu") -> Runtime:
    """Return the installed runtime of a shipped lock; one for the running Python comes first. Raises RuntimeMissing, LockError."""
    stem = lockfile.stem_of(name, device)
    locks = [lock for lock in lockfile.list_shipped() if lock.stem == stem]
    locks.sort(key=lambda lock: lock.minor != paths.minor_of_running())
    if not locks:
        lockfile.load(name, device, paths.minor_of_running())  # raises, with the names
    for lock in locks:
        folder = folder_of(lock)
        if marker := read_marker(folder, lock.digest):
            site = [str(folder / "site")] if stem == lockfile.OVERLAY else []
            return Runtime(Path(marker.python), site, marker.versions, folder)
    raise RuntimeMissing(
        f"runtime {name} ({device}) is not installed at {folder_of(locks[0])}. Next: {command_for(locks[0])}"
    )


def list_runtimes() -> list[Listed]:
    """List the runtimes of all shipped locks, then folders of other locks."""
    rows = []
    locks = [lock for lock in lockfile.list_shipped() if lock.stem != lockfile.BASE]
    for lock in locks:
        folder = folder_of(lock)
        marker = read_marker(folder, lock.digest)
        state = "ready" if marker else "half-made" if folder.exists() else "missing"
        rows.append(
            Listed(
                lock.folder_name,
                state,
                str(folder),
                marker.size_bytes if marker else 0,
                lock.versions,
                "" if marker else command_for(lock),
            )
        )
    known = {lock.folder_name for lock in locks}
    for folder in sorted(paths.runtimes_root().glob("[a-z]*-py3*-*")):
        if folder.name not in known:
            rows.append(Listed(folder.name, "stale", str(folder), 0, {}, "artd runtime prune"))
    return rows
