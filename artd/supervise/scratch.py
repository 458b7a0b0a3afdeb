"""Removes the scratch folders that dead processes left below the runtime folder.

The daemon calls it only after the processes of older boots are proven dead. A folder stays if any living process,
whoever owns it, works in it or has its TMPDIR there or below.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from . import procfs

SPAWN = re.compile(r"[a-z][0-9]+(-[0-9]+)*")
"""The first letter of a worker's kind, its run and replica, and a spawn number: see layout.DataDir.spawn_dir."""


def sweep_folders(runtime: Path) -> list[Path]:
    """Remove the scratch folders that no living process uses. Returns the removed folders."""
    found = [path for path in runtime.iterdir() if SPAWN.fullmatch(path.name) and path.is_dir()]
    used = _find_used(runtime) if found else set()
    gone = [path for path in found if path.name not in used]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return gone


def _find_used(runtime: Path) -> set[str]:
    """Return the names below the runtime folder that a living process uses."""
    within = f"{runtime}/"
    used = set()
    for stat in procfs.all_stats():
        for place in (procfs.environment(stat.pid).get("TMPDIR", ""), _working_in(stat.pid)):
            if place.startswith(within):
                used.add(place[len(within) :].partition("/")[0])
    return used


def _working_in(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # the process is gone, or belongs to another user
        return ""
