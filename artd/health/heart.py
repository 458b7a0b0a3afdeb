"""Proves once a second that the event loop and the writer live, for `pulse` and a service manager.

The writer's last sign of life moves only after the writer has ended a transaction: anybody's, or an empty one of the heart.
At most one of the heart's waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import anyio

from artd.datadir.layout import DataDir

from . import pulse

log = logging.getLogger(__name__)
PERIOD_S = 1.0


class Heart:
    """Writes the heartbeat in the runtime folder. Every second beat calls `mend`, which makes removed sockets again; every beat
    calls `alive`, which tells a service manager that the loop lives."""

    def __init__(
        self, data: DataDir, mend: Callable[[], None] = lambda: None, alive: Callable[[], None] = lambda: None
    ) -> None:
        self._data = data
        self._mend = mend
        self._alive = alive
        self._submit: Callable[[], asyncio.Future[object]] | None = None
        self._commits: Callable[[], int] = lambda: 0
        self._seen = 0
        self._asking = False
        self._wrote = time.monotonic_ns()
        self._failed = ""

    def watch(self, submit: Callable[[], asyncio.Future[object]], commits: Callable[[], int]) -> None:
        """Watch the writer too, from now on. `submit` gives it an empty transaction; `commits` counts those that it ended."""
        self._submit, self._commits = submit, commits

    async def run(self) -> None:
        """Beat until cancelled."""
        beats = 0
        while True:
            if beats % 2 == 0:
                self._mend()
            self.beat()
            beats += 1
            await anyio.sleep(PERIOD_S)

    def beat(self) -> None:
        """Write the times of the loop and the writer into the file. A missing folder is logged once."""
        now = time.monotonic_ns()
        self._ask_writer(now)
        try:
            pulse.write(self._data.runtime, now, self._wrote)
            self._failed = ""
        except OSError as error:
            if str(error) != self._failed:
                log.warning("cannot write the heartbeat: %s", error)
            self._failed = str(error)
        self._alive()

    def _ask_writer(self, now: int) -> None:
        """Give the writer an empty transaction, unless it ended one since the last beat, or one waits already."""
        seen, self._seen = self._seen, self._commits()
        if self._submit is None or self._seen != seen:
            self._wrote = now
        elif not self._asking:
            self._asking = True
            self._submit().add_done_callback(self._note_answer)

    def _note_answer(self, answer: asyncio.Future[object]) -> None:
        """Note that the writer lives. A refusal (the disk is full) is a sign of life too."""
        if not answer.cancelled():
            answer.exception()
        self._asking, self._wrote = False, time.monotonic_ns()

    def close(self) -> None:
        """Remove the heartbeat's file. Call it when the daemon ends."""
        with contextlib.suppress(OSError):
            (self._data.runtime / pulse.FILE).unlink()
