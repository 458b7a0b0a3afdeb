"""Requests of rollouts: which rollout a request belongs to, and what becomes of its reply (docs/adr/0006).

`Asking` owns the replies on their way. Each of them ends once, as whole or as lost, and the daemon is told after the ledger has it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from artd_schema.codec import digest
from artd_schema.crashpoint import reach
from artd_schema.wire.deliveries import Delivery, Recall, Recalled
from artd_schema.wire.worker import Exchange
from artd_workers.gateway.errors import ApiError
from artd_workers.gateway.ledger import Send
from artd_workers.gateway.limits import Limits

SPAWN_BITS = 40
"""The bits of a place below the gateway's spawn."""


@dataclass
class Asked:
    """One request of a rollout. place: its number among all requests; request: its digest; repeats: whether the client says that it sent
    the same before; reply: run and id of the response, once it is on its way to the ledger; writing: until the ledger has it."""

    rollout: str
    place: int
    request: str
    repeats: bool
    reply: tuple[str, str] | None = None
    writing: asyncio.Future[None] | None = field(default=None, repr=False)


class Asking:
    """Numbers the requests of rollouts and tells the daemon how their replies end. spawn: this gateway's."""

    def __init__(self, send: Send, limits: Limits, spawn: int) -> None:
        self._send = send
        self._limits = limits
        self._places = itertools.count(spawn << SPAWN_BITS)
        self._numbers = itertools.count(1)
        self._recalls: dict[int, asyncio.Future[tuple[Recalled, Sequence[bytes]]]] = {}
        self._ending: dict[tuple[str, str], set[asyncio.Future[None]]] = {}

    def begin(self, rollout: str, content: Sequence[bytes], repeats: bool) -> Asked:
        """Give a request its place. content: all that makes a request the same as another one."""
        return Asked(rollout, next(self._places), digest(b"\0".join(content)), repeats)

    async def write(self, asked: Asked | None, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which writes the entry. The client may go while this waits: the entry is written all the same."""
        writing = asyncio.ensure_future(work)
        if asked is not None:
            asked.reply, asked.writing = (exchange.run, exchange.response_id), writing
        await asyncio.shield(writing)

    def end(self, asked: Asked, whole: bool) -> None:
        """Note how the reply ended. whole: its last byte has left while the client was there."""
        if asked.reply is None:
            return
        if asked.writing is None or asked.writing.done():
            self._tell(asked, whole)
            return
        key = (asked.rollout, asked.request)
        ending = self._ending.setdefault(key, set())
        ending.add(asked.writing)

        def tell(writing: asyncio.Future[None]) -> None:
            ending.discard(writing)
            if not ending and self._ending.get(key) is ending:
                del self._ending[key]
            self._tell(asked, whole)

        asked.writing.add_done_callback(tell)

    async def recall(self, run: str, asked: Asked) -> Sequence[bytes]:
        """Return the turns of an undelivered reply to the same request; none when there is no such reply. Raises ApiError 503 when the
        daemon does not answer."""
        if ending := self._ending.get((asked.rollout, asked.request)):
            await asyncio.wait(set(ending))
        number = next(self._numbers)
        answer = self._recalls[number] = asyncio.get_running_loop().create_future()
        try:
            recall = Recall(number=number, run=run, rollout=asked.rollout, request=asked.request, place=asked.place)
            self._send(recall, ())
            async with asyncio.timeout(self._limits.ledger_s):
                told, turns = await answer
        except TimeoutError:
            what = f"the daemon did not look for the stored reply within {self._limits.ledger_s:.0f} s; try again"
            raise ApiError(503, "ledger_timeout", what, retry_after_s=self._limits.retry_after_s) from None
        finally:
            del self._recalls[number]
        if told.error:
            what = f"the daemon could not read the stored reply: {told.error}"
            raise ApiError(503, "ledger_refused", what, retry_after_s=self._limits.retry_after_s)
        if told.response_id:
            asked.reply = (run, told.response_id)
        return turns

    def settle(self, told: Recalled, turns: Sequence[bytes]) -> None:
        """Hand an answer to the request that waits for it."""
        answer = self._recalls.get(told.number)
        if answer is not None and not answer.done():
            answer.set_result((told, turns))

    def _tell(self, asked: Asked, whole: bool) -> None:
        if asked.reply is None:
            return
        if asked.writing is not None and not asked.writing.cancelled() and asked.writing.exception() is not None:
            whole = False  # the ledger refused it, or was too slow to say that it has it
        reach("gateway.ended")
        run, response_id = asked.reply
        self._send(Delivery(run=run, response_id=response_id, whole=whole), ())
