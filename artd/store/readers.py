"""Answers clients' questions on read-only connections of its own, each question with a deadline.

Owns a few threads with a connection each. No question waits for the services' connection. A question ends at its
deadline, when nobody waits for its answer any more, and when the daemon stops, in the middle of a statement if need be.
`hold` makes new questions wait until no reader uses the write-ahead log, because only then can the log start anew.
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
"""Instructions of SQLite's virtual machine between two looks at the clock, about 50 us."""
HOLD_S = 6.0
"""The longest hold: the reader that is in the way may be another process, which no hold stops."""
HOLD_AGAIN_S = 60.0
"""The shortest time from the start of one hold to the start of the next."""


class TooSlow(Exception):
    """A question ended before its answer was complete."""


class _Question:
    """One call. `end` is its deadline in monotonic seconds, None for none; `left` says that nobody waits for the answer."""

    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed
        self.end: float | None = None
        self.left = False

    def is_over(self) -> bool:
        return self.left or self._closed.is_set() or (self.end is not None and time.monotonic() > self.end)


class Readers:
    """Runs at most `count` questions at the same time, each for at most `deadline_s` seconds (None: no limit)."""

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
        """Call `fn` in a thread, on one snapshot of the rows. Returns its result.

        Raises TooSlow at the deadline and when the store closes, and what `fn` raises.
        """
        if self._closed.is_set():
            raise TooSlow("the daemon is stopping: ask again after its next start")
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
                raise TooSlow("the daemon ended this query because it took too long") from None
            raise
        finally:
            connection.set_progress_handler(None, 0)

    def _connection(self) -> sqlite3.Connection:
        """Return the connection of the calling thread; open it at the first call."""
        if not hasattr(self._mine, "connection"):
            self._mine.connection = open_readonly(self._path, shared=True)
            self._connections.append(self._mine.connection)
        found: sqlite3.Connection = self._mine.connection
        return found

    def hold(self, wanted: bool) -> None:
        """Make new questions wait, or let them go on. Any thread may call this.

        A hold ends by itself after `HOLD_S`, and the next one starts at the earliest `HOLD_AGAIN_S` after it started.
        """
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
        """End the questions under way and close the connections."""
        self._closed.set()
        self._open.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
        for connection in self._connections:
            connection.close()
