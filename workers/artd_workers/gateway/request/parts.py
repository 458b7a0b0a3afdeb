"""Streams that broke: what the client was shown of them is recorded, and never trained.

The entry has split `eval`, and its choices the finish reason `abort`, so that nothing mistakes it for an answer.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec

from artd_workers.gateway.engine import origins
from artd_workers.gateway.errors import ApiError, EngineFailure
from artd_workers.gateway.ledger import Ledger
from artd_workers.gateway.limits import Limits
from artd_workers.gateway.routing import Table

from .deliver import describe
from .live import Live
from .request import Generated

log = logging.getLogger("artd.gateway")


class Parts:
    """Records parts beside the requests that they are of, which have ended."""

    def __init__(self, table: Table, ledger: Ledger, limits: Limits) -> None:
        self._table = table
        self._ledger = ledger
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, live: Live) -> None:
        """Record what has been shown of an answer that ended early; nobody waits for it."""
        task = asyncio.get_running_loop().create_task(self._record(live))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record(self, live: Live) -> None:
        replies = live.part()
        job = live.at.job
        if not any(reply["choices"] for reply in replies):
            return
        try:
            count = sum(len(reply["choices"]) for reply in replies)
            told = [origins.UNKNOWN if self._table.moved(live.at.place) else None] * count
            made = live.collect(replies, [None] * count, list(told))
            entry = await describe(_eval(made), self._table, self._limits)
            exchange = msgspec.structs.replace(entry.exchange, part=job.asked is not None)
            await self._ledger.record(exchange, entry.columns)
        except (EngineFailure, ApiError) as error:
            log.warning("%s broke, and what was shown of it is not in the ledger: %s", job.response_id, error)


def _eval(made: Generated) -> Generated:
    return replace(made, job=replace(made.job, split="eval"))
