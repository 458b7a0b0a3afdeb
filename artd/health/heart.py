"""The daemon's heart: once a second it proves that event loop and writer live, and tells who asks (`pulse`, a service manager).

Owner of: what is known of the writer. Invariants: the writer's time moves only after a transaction of its own has ended, and at most one
of these waits.
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
    """Beats until cancelled, in the runtime folder. mend: called at every other beat, makes again what was removed there;
    alive: called at every beat, tells a service manager of the loop."""

    def __init__(
        self, data: DataDir, mend: Callable[[], None] = lambda: None, alive: Callable[[], None] = lambda: None
    ) -> None:
        self._data = data
        self._mend = mend
        self._alive = alive
        self._submit: Callable[[], asyncio.Future[object]] | None = None
        self._asking = False
        self._wrote = time.monotonic_ns()
        self._failed = ""

    def watch(self, submit: Callable[[], asyncio.Future[object]]) -> None:
        """From now on the writer counts, too. submit: hands it an empty transaction."""
        self._submit = submit

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
        """Tell the file that the loop lives, and what is known of the writer. A folder that is away is told once."""
        now = time.monotonic_ns()
        self._hear(now)
        try:
            pulse.write(self._data.runtime, now, self._wrote)
            self._failed = ""
        except OSError as error:
            if str(error) != self._failed:
                log.warning("the heartbeat cannot be written: %s", error)
            self._failed = str(error)
        self._alive()

    def _hear(self, now: int) -> None:
        """At most one question to the writer is open."""
        if self._submit is None:
            self._wrote = now
            return
        if not self._asking:
            self._asking = True
            self._submit().add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[object]) -> None:
        """A refusal (a full disk) is an answer, too: whoever gave it lives."""
        if not answer.cancelled():
            answer.exception()
        self._asking, self._wrote = False, time.monotonic_ns()

    def close(self) -> None:
        """The daemon ends."""
        with contextlib.suppress(OSError):
            (self._data.runtime / pulse.FILE).unlink()
