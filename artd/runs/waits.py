"""Clients that wait for a step: one look at the rows for all who wait for the same, and none in the writer.

Owner of: the waits under way. Invariants: a waiter is answered by a look that began after it asked, so it sees whatever it
was told before; a change wakes one look for each (run, step) and not one for each waiter; when nobody waits, nobody looks.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable

import anyio

from artd.store.readers import TooSlow
from artd.store.store import Store
from artd_schema.wire import client_api as api

LONGEST_S = 60.0
PACE_S, SLOWEST_S = 0.002, 1.0
"""Between two looks for one (run, step), for each that is waited for: whoever waits for a thousand steps waits a little longer."""

Look = Callable[[sqlite3.Connection, str, int], api.Answer]
Waiter = asyncio.Future[api.Answer]


class _Watch:
    """Everybody who waits for one step, in the order of asking. pending: the newest answer that ends no wait."""

    def __init__(self) -> None:
        self.waiters: dict[Waiter, None] = {}
        self.looking = asyncio.Lock()
        self.next: asyncio.Task[api.Answer] | None = None
        self.pending: api.Answer | None = None
        self.task: asyncio.Task[None] | None = None


class Waits:
    """look(connection, run, step): Pending, or what ends a wait. Errors: its own."""

    def __init__(self, store: Store, look: Look) -> None:
        self._store = store
        self._look = look
        self._watches: dict[tuple[str, int], _Watch] = {}

    async def wait(self, op: api.WaitStep) -> api.Answer:
        """What ends the wait, or Pending at its time-out."""
        end = self._store.clock.monotonic() + min(op.timeout_s, LONGEST_S)
        key = (op.run, op.step)
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

    async def _follow(self, key: tuple[str, int], watch: _Watch, changed: asyncio.Event) -> None:
        """Look after each change, and answer those who wait."""
        while True:
            await changed.wait()
            changed = self._store.change()
            asked = list(watch.waiters)
            try:
                answer: api.Answer | Exception = await self._fresh(key, watch)
            except TooSlow:
                await anyio.sleep(SLOWEST_S)
                changed = asyncio.Event()
                changed.set()  # once more
                continue
            except Exception as error:
                answer = error
            if isinstance(answer, api.Pending):
                watch.pending = answer
            else:
                _end(asked, answer)
            await anyio.sleep(min(PACE_S * len(self._watches), SLOWEST_S))

    async def _fresh(self, key: tuple[str, int], watch: _Watch) -> api.Answer:
        """The answer of a look that begins from now on; shared by all who ask before it does."""
        if watch.next is None:
            watch.next = asyncio.ensure_future(self._once(key, watch))
            watch.next.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # nobody may be left to hear it
        return await asyncio.shield(watch.next)

    async def _once(self, key: tuple[str, int], watch: _Watch) -> api.Answer:
        async with watch.looking:
            watch.next = None
            return await self._store.ask(lambda c: self._look(c, *key))


def _end(waiters: list[Waiter], answer: api.Answer | Exception) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if isinstance(answer, Exception):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)
