"""Keeps the logs of the daemon and its workers small: it moves the contents of a large log to NAME.log.1.

Owns NAME.log.1 in DATA/logs. It copies a file and then truncates it, and never renames it, because the writing process
appends to it and learns nothing (text written between the copy and the cut is lost). Readers see a file that has become
shorter.
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
    """The logs in a folder. It cuts a log that has more than `limit` bytes; 0 means never."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    async def run(self) -> None:
        """Look at all logs once a minute, until cancelled."""
        while self._limit:
            await anyio.to_thread.run_sync(self.look)
            await anyio.sleep(PERIOD_S)

    def look(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            try:
                if path.stat().st_size > self._limit:
                    cut(path)
            except OSError as error:  # the next look tries again; nothing depends on the size of a log
                log.warning("cannot cut %s, artd will try again: %s", path, error.strerror or error)


def older(path: Path) -> Path:
    """Return the file that has a log's older contents."""
    return path.with_name(f"{path.name}.1")


def cut(path: Path) -> None:
    """Move the contents of a log to its `.1`, in place of the older contents there. Raises OSError."""
    made = path.with_name(f".{path.name}.1")
    try:
        shutil.copyfile(path, made)
        made.chmod(0o600)
        made.replace(older(path))
        os.truncate(path, 0)
    finally:
        made.unlink(missing_ok=True)
