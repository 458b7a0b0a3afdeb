"""Deletes copies of code in DATA/code that no checkpoint's manifest names and no process of this boot runs."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from artd.datadir.layout import CODE_COPY, DataDir
from artd.supervise.code import lock_copies
from artd_schema.codec import UNREADABLE
from artd_schema.data.manifest import MANIFEST_FILE, read_code

log = logging.getLogger(__name__)
KEPT_S = 86400.0
"""A copy that was installed or used again so recently stays: a command of another artd may run it."""


def delete_copies(data: DataDir, used: Collection[str]) -> list[str]:
    """Delete copies of code that nothing uses any more. `used` has the digests of this boot. Returns the digests that
    were deleted.

    If a manifest cannot be read, it deletes nothing. It never deletes a folder that artd did not name. Raises OSError
    if DATA/code cannot be read.
    """
    unused = {path.name: path for path in data.code.iterdir() if path.name not in used and _is_old_copy(path)}
    if not unused:
        return []
    try:
        for manifest in data.checkpoints.glob(f"*/*/{MANIFEST_FILE}"):
            for code in read_code(manifest.parent).used:
                unused.pop(code.digest, None)
    except (*UNREADABLE, OSError):
        return []
    with lock_copies(data.code):
        return sorted(path.name for path in unused.values() if _is_old_copy(path) and _delete(path))


def _delete(path: Path) -> bool:
    """Return whether it is gone. Of no use to a run, a copy must not keep the daemon from starting."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s, a copy of code that no checkpoint names, cannot be deleted: %s", path, error)
        return False
    return True


def _is_old_copy(path: Path) -> bool:
    """Return whether artd made this folder, and did not use it for a day."""
    made = CODE_COPY.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()
    return made and time.time() - path.stat().st_mtime > KEPT_S
