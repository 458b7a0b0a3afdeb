"""Lets many clients wait for a step with one query for all who wait for the same step, outside the writer.

Owns the waits under way. A waiter is answered by a query that began after it asked, so the answer includes everything
that was committed before. A change triggers one query for each key, not one for each waiter. Without waiters
there are no queries.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Literal

import anyio

from artd.store.readers import TooSlow
from artd.store.store import Store
from artd_schema.wire import client_api as api

LONGEST_S = 60.0
PACE_S, SLOWEST_S = 0.002, 1.0
"""The pause between two queries for one key is PACE_S for each key that clients wait for, at most
SLOWEST_S."""

Key = tuple[str, int, Literal["first", "all"]]
"""(run, step, engines) as in WaitStep."""
Look = Callable[[sqlite3.Connection, Key], api.Answer]
Waiter = asyncio.Future[api.Answer]


class _Watch:
    """All clients that wait for the same step, in the order in which they asked. `pending` is the newest answer that did not
    end the wait."""

    def __init__(self) -> None:
        self.waiters: dict[Waiter, None] = {}
        self.looking = asyncio.Lock()
        self.next: asyncio.Task[api.Answer] | None = None
        self.pending: api.Answer | None = None
        self.task: asyncio.Task[None] | None = None


class Waits:
    """Answers waits. `look(connection, key)` returns Pending, or the answer that ends a wait; what it raises ends
    the wait, too."""

    def __init__(self, store: Store, look: Look) -> None:
        self._store = store
        self._look = look
        self._watches: dict[Key, _Watch] = {}

    async def wait(self, op: api.WaitStep) -> api.Answer:
        """Return the answer that ends the wait, or Pending at its time-out."""
        end = self._store.clock.monotonic() + min(op.timeout_s, LONGEST_S)
        key = (op.run, op.step, op.engines)
        watch = self._watches.setdefault(key, _Watch())
        waiter: Waiter = asyncio.get_running_loop().create_future()
        watch.waiters[waiter] = None
        changed = self._store.change()
        try:
            answer = await self._fresh(key, watch)
            left = end - self._store.clock.monotonic()
            if not isinstance(answer, api.Pending) or left <= 0:
                return answer
            watch.pending = answer
            if watch.task is None:
                watch.task = asyncio.ensure_future(self._follow(key, watch, changed))
            with anyio.move_on_after(left):
                return await waiter
            return watch.pending
        finally:
            watch.waiters.pop(waiter, None)
            if not watch.waiters and self._watches.get(key) is watch:
                del self._watches[key]
                if watch.task is not None:
                    watch.task.cancel()

    async def _follow(self, key: Key, watch: _Watch, changed: asyncio.Event) -> None:
        """Query after each change, and answer the waiters that asked before the query."""
        while True:
            await changed.wait()
            changed = self._store.change()
            asked = list(watch.waiters)
            try:
                answer: api.Answer | Exception = await self._fresh(key, watch)
            except TooSlow:
                await anyio.sleep(SLOWEST_S)
                changed = asyncio.Event()
                changed.set()  # query again, although nothing changed
                continue
            except Exception as error:
                answer = error
            if isinstance(answer, api.Pending):
                watch.pending = answer
            else:
                _end(asked, answer)
            await anyio.sleep(min(PACE_S * len(self._watches), SLOWEST_S))

    async def _fresh(self, key: Key, watch: _Watch) -> api.Answer:
        """Return the answer of a query that begins from now on. Everybody who asks before it begins shares it."""
        if watch.next is None:
            watch.next = asyncio.ensure_future(self._once(key, watch))
            watch.next.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # asyncio warns of an exception that nobody reads, and every waiter may be gone
        return await asyncio.shield(watch.next)

    async def _once(self, key: Key, watch: _Watch) -> api.Answer:
        async with watch.looking:
            watch.next = None
            return await self._store.ask(lambda c: self._look(c, key))


def _end(waiters: list[Waiter], answer: api.Answer | Exception) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if isinstance(answer, Exception):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)
