"""What dead processes left: scratch folders below the runtime folder, and what an engine's record names.

Owner of: no state. Invariants: called only when the processes of older boots were proven dead; a folder that any living process has
as its TMPDIR or below, or works in, stays, whoever's process that is.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from . import procfs

SPAWN = re.compile(r"[a-z][0-9]+")
"""The first letter of a worker's name, and a spawn number: see rundir.DataDir.spawn_dir."""


def sweep_folders(runtime: Path) -> list[Path]:
    """Remove the scratch folders of which no process lives; returns them."""
    found = [path for path in runtime.iterdir() if SPAWN.fullmatch(path.name) and path.is_dir()]
    used = _used(runtime) if found else set()
    gone = [path for path in found if path.name not in used]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return gone


def _used(runtime: Path) -> set[str]:
    """Names below the runtime folder in which somebody lives."""
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
    except OSError:  # it is gone, or another user's
        return ""
