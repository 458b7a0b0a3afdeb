"""Read-only connections for what clients ask: each question has a deadline, and none waits for the services' connection.

Owner of: a few threads with a connection each. Invariants: a question ends at its deadline, when nobody waits for its answer
any more, and when the daemon ends, in the middle of a statement if need be; `hold` lets no new one begin, so that the
write-ahead log, which no reader may be in the middle of, can begin anew.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from .readonly import open_readonly, snapshot

T = TypeVar("T")
STEPS = 4000
"""Of SQLite's machine, between two looks at the clock: some 50 us."""
HOLD_S = 6.0
"""No longer: the reader that is in the way may be another process."""
HOLD_AGAIN_S = 60.0


class TooSlow(Exception):
    """A question was ended before its answer was complete."""


class _Question:
    """One call. end: monotonic seconds, None = none; left: nobody waits for its answer."""

    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed
        self.end: float | None = None
        self.left = False

    def is_over(self) -> bool:
        return self.left or self._closed.is_set() or (self.end is not None and time.monotonic() > self.end)


class Readers:
    """count: questions at the same time; deadline_s: of each, None = none."""

    def __init__(self, path: Path, count: int, deadline_s: float | None) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="artd-reader")
        self._mine = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._closed = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._held = float("-inf")

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """What `fn` makes of one snapshot of the rows. Errors: TooSlow, also when the store closes; those of `fn`."""
        if self._closed.is_set():
            raise TooSlow("the daemon is stopping")
        question = _Question(self._closed)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._call, fn, question)
        except asyncio.CancelledError:
            question.left = True
            raise

    def _call(self, fn: Callable[[sqlite3.Connection], T], question: _Question) -> T:
        self._open.wait(HOLD_S)
        if self._deadline_s is not None:
            question.end = time.monotonic() + self._deadline_s
        connection = self._connection()
        connection.set_progress_handler(question.is_over, STEPS)
        try:
            with snapshot(connection):
                return fn(connection)
        except sqlite3.OperationalError:
            if question.is_over():
                raise TooSlow("this took too long to read and was ended") from None
            raise
        finally:
            connection.set_progress_handler(None, 0)

    def _connection(self) -> sqlite3.Connection:
        """The calling thread's."""
        if not hasattr(self._mine, "connection"):
            self._mine.connection = open_readonly(self._path, shared=True)
            self._connections.append(self._mine.connection)
        found: sqlite3.Connection = self._mine.connection
        return found

    def hold(self, wanted: bool) -> None:
        """Whether a new question waits; from any thread. A hold that did not help ends by itself, and is not renewed at once."""
        now = time.monotonic()
        if not wanted:
            self._held = float("-inf")
            self._open.set()
        elif self._open.is_set() and now - self._held > HOLD_AGAIN_S:
            self._held = now
            self._open.clear()
        elif now - self._held > HOLD_S:
            self._open.set()

    async def close(self) -> None:
        """End what is asked now."""
        self._closed.set()
        self._open.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
        for connection in self._connections:
            connection.close()
