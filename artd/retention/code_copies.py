"""Deletes copies of code in DATA/code that no checkpoint's manifest names and no process of this boot runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from pathlib import Path

from artd.datadir.layout import DataDir
from artd.supervise.code import lock_copies
from artd_schema.codec import UNREADABLE
from artd_schema.manifest import MANIFEST_FILE, read_code

KEPT_S = 86400.0
"""A copy that was installed or used again so recently stays: a command of another artd may run it."""


def delete_copies(data: DataDir, used: Collection[str]) -> list[str]:
    """Delete what nothing names any more. `used` are the digests of this boot. Returns those that are gone.

    Deletes nothing if a manifest cannot be read. Raises OSError.
    """
    unused = {path.name: path for path in data.code.iterdir() if path.name not in used and _is_old(path)}
    if not unused:
        return []
    try:
        for manifest in data.checkpoints.glob(f"*/*/{MANIFEST_FILE}"):
            for code in read_code(manifest.parent).used:
                unused.pop(code.digest, None)
    except (*UNREADABLE, OSError):
        return []
    with lock_copies(data.code):
        for path in unused.values():
            if _is_old(path):
                shutil.rmtree(path)
    return sorted(unused)


def _is_old(path: Path) -> bool:
    return path.is_dir() and time.time() - path.stat().st_mtime > KEPT_S
