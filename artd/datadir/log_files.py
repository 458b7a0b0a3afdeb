"""Logs of the daemon and of its workers stay small: each goes on in an empty file once it is large, beside what it held.

Owner of: NAME.log.1 in DATA/logs. Invariants: a file is copied and then cut, never renamed: whoever writes to it appends, and is told
nothing (what is written between the two is lost); readers see a file that has become shorter.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import anyio
import anyio.to_thread

log = logging.getLogger(__name__)
PERIOD_S = 60.0


class LogFiles:
    """limit: bytes of a log at which it is cut; 0: never."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    async def run(self) -> None:
        """Look once a minute, until cancelled."""
        while self._limit:
            await anyio.to_thread.run_sync(self.look)
            await anyio.sleep(PERIOD_S)

    def look(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            try:
                if path.stat().st_size > self._limit:
                    cut(path)
            except OSError as error:  # it can wait: a log is never what artd stands on
                log.warning("%s cannot be cut: %s", path, error.strerror or error)


def cut(path: Path) -> None:
    """Empty a log; what it held is in its `.1` then, in place of what was there. Raises OSError."""
    older, made = path.with_name(f"{path.name}.1"), path.with_name(f".{path.name}.1")
    try:
        shutil.copyfile(path, made)
        made.chmod(0o600)
        made.replace(older)
        os.truncate(path, 0)
    finally:
        made.unlink(missing_ok=True)
