"""Time that passes only when nobody has anything left to do: an event loop, a clock, threads and a store without threads.

Owner of: the virtual seconds of one loop. Invariants: no real time, no thread and no descriptor decides what happens next;
the one source of chance is the `Random` that is passed in.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from artd.clock import Clock
from artd.store.readonly import open_readonly
from artd.store.writer import Write, Writer

EPOCH_MS = 1_700_000_000_000


class Stuck(Exception):
    """Every task waits for something that nobody will ever do."""


class Crashed(BaseException):
    """The simulated daemon's process ends here."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer as soon as nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = 1e-6  # a timer reached by adding may lie a rounding error ahead
        self._selector.select = self._pass_time  # type: ignore[attr-defined]
        self._timers = 0

    def time(self) -> float:
        return self._now

    def _pass_time(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("every task waits, and no timer is set")
        self._now += max(timeout, 0.0)
        return []

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self._timers += 1  # of two timers of the same moment the older one is first: a heap promises no order
        return super().call_at(when + 1e-11 * self._timers, callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        raise AssertionError(f"a thread would run {func}: virtual time cannot wait for it")


class VirtualClock(Clock):
    """The loop's seconds; the wall clock jumps when told."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.offset_s = 0.0

    def now_ms(self) -> int:
        return EPOCH_MS + int((self._loop.time() + self.offset_s) * 1000)

    def monotonic(self) -> float:
        return self._loop.time()


class InlineThreads:
    """Stands in for `anyio.to_thread.run_sync`: the call happens in the loop, at some moment of a short while."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def run_sync(self, func: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await anyio.sleep(self._rng.uniform(0.0, 0.02))
        result = func(*args)
        await anyio.sleep(self._rng.uniform(0.0, 0.02))
        return result


class InlineWriter(Writer):
    """The real writer's transactions, in the loop: a group commits a little after its first write was queued, and is answered
    after that. Once `dead`, nothing is written and nobody is answered, as after a kill."""

    def __init__(self, path: Path, on_fatal: Callable[[BaseException], None], latency: Callable[[], float]) -> None:
        super().__init__(path, on_fatal)
        self._connection.execute("PRAGMA synchronous = OFF")  # no test of this folder pulls the plug
        self._latency = latency
        self._due = False
        self.dead = False

    def start(self, loop: asyncio.AbstractEventLoop, on_commit: Callable[[], None]) -> None:
        self._loop, self._on_commit = loop, on_commit

    def submit(self, fn: Write) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.dead:
            return future
        self._queue.put((fn, future))
        if not self._due:
            self._due = True
            self._loop.call_later(self._latency(), self._turn)
        return future

    def _turn(self) -> None:
        if self.dead:
            return
        self._due = False
        group = self._next_group()
        assert group is not None
        try:
            self._commit(group)
            self._checkpoint()
        except Crashed:
            self.dead = True

    def stop(self) -> None:
        """Close; what an open transaction wrote is rolled back."""
        self.dead = True
        self._connection.close()


class InlineReader:
    """A read-only connection without a thread."""

    def __init__(self, path: Path, latency: Callable[[], float]) -> None:
        self._connection = open_readonly(path)
        self._latency = latency

    async def run(self, fn: Callable[[sqlite3.Connection], Any]) -> Any:
        await anyio.sleep(self._latency())
        return fn(self._connection)

    def hold(self, wanted: bool) -> None:
        pass

    async def execute_fetchall(self, sql: str, parameters: Sequence[Any]) -> list[sqlite3.Row]:
        await anyio.sleep(self._latency())
        return self._connection.execute(sql, parameters).fetchall()

    async def close(self) -> None:
        self._connection.close()
