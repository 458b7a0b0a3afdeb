"""Tells open pages that something changed: one watcher for all of them, which asks SQLite whether somebody wrote.

`PRAGMA data_version` of a connection that stays open changes when another connection has committed, and costs no read of a
table. The state of the daemon is no row, so the watcher looks at its lock too.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from artd.cli.daemon_probe import find_daemon
from artd.store.readonly import open_readonly
from artd_schema.paths import DATABASE

log = logging.getLogger(__name__)
LOOK_S = 0.5
SILENCE_S = 15.0
"""A page hears from the server at least this often, so that it notices a broken connection."""
NEWEST = "SELECT coalesce(max(id), 0) FROM event"


class Mark(NamedTuple):
    """What a page compares: the number of the newest event (-1: no database), a count of changes, and the daemon's state."""

    event: int
    version: int
    daemon: str


class Watcher:
    """Looks at a data folder every LOOK_S while pages are open."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._connection: sqlite3.Connection | None = None
        self._changed = anyio.Event()
        self.mark = Mark(-1, 0, "")
        self.pages = 0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            if self.pages:
                mark = await anyio.to_thread.run_sync(self._look)
                if mark != self.mark:
                    self.mark, changed, self._changed = mark, self._changed, anyio.Event()
                    changed.set()
            await anyio.sleep(LOOK_S)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events for one page: the mark now, and again at each change."""
        self.pages += 1
        told: Mark | None = None
        try:
            while True:
                changed = self._changed
                if self.mark != told:
                    told = self.mark
                    yield f"event: change\ndata: {json.dumps(told._asdict())}\n\n".encode()
                else:
                    yield b": nothing new\n\n"
                with anyio.move_on_after(SILENCE_S):
                    await changed.wait()
        finally:
            self.pages -= 1

    def _look(self) -> Mark:
        daemon = find_daemon(self._data).state
        try:
            if self._connection is None:
                self._connection = open_readonly(self._data / DATABASE, 1.0, shared=True)
            [version] = self._connection.execute("PRAGMA data_version").fetchone()
            [event] = self._connection.execute(NEWEST).fetchone()
        except sqlite3.Error as error:  # there is none yet, or it was restored: open it anew at the next look
            log.debug("%s cannot be read: %s", self._data / DATABASE, error)
            self.close()
            return Mark(-1, 0, daemon)
        return Mark(event, version, daemon)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
