"""Notes what became of the replies of rollouts, and finds those that no client has (docs/adr/0006).

A mark is one write that nobody waits for. A look for an undelivered reply goes through the writer, so that it sees every mark
and response that came before it.
"""

from __future__ import annotations

import sqlite3

import anyio
import anyio.to_thread

from artd.store.blobs import Blobs
from artd.store.store import Store
from artd.tables.exchanges import UNDELIVERED, first_place, mark_delivery, resume_delivery
from artd_schema.crashpoint import reach
from artd_schema.wire import worker as w
from artd_schema.wire.deliveries import Delivery, Recall, Recalled

from .by_reference import read_turn
from .ingest import Ingest

FIND = (
    "SELECT e.response_id FROM rollout o JOIN exchange e ON e.rollout_id = o.id WHERE o.run_id = ? AND o.name = ? AND e.request = ?"
    f" AND e.trajectory_id IS NULL AND {UNDELIVERED} ORDER BY e.place LIMIT 1"
)
READ = "SELECT response_id, choice, turn, blob FROM exchange WHERE run_id = ? AND response_id = ? ORDER BY choice"


class Deliveries:
    """Answers what the gateway says and asks of replies."""

    def __init__(self, store: Store, ingest: Ingest, blobs: Blobs) -> None:
        self._store = store
        self._ingest = ingest
        self._blobs = blobs
        self._entering: dict[str, anyio.Event] = {}

    async def exchange(self, message: w.Exchange, bulk: list[bytes]) -> w.ExchangeAck:
        """Write a response to the ledger, as `Ingest.exchange`; marks of it that come meanwhile wait."""
        entered = self._entering[message.response_id] = anyio.Event()
        try:
            return await self._ingest.exchange(message, bulk)
        finally:
            del self._entering[message.response_id]
            entered.set()

    async def note(self, message: Delivery) -> None:
        """Write a mark. Raises NotFound for a run that is gone."""
        run = await self._ingest.facts(message.run)
        if (entered := self._entering.get(message.response_id)) is not None:  # its turns may be on their way to files
            await entered.wait()
        delivery = "delivered" if message.whole else "lost"
        await self._store.write(lambda c: mark_delivery(c, run.id, message.response_id, delivery))
        reach("delivery.committed")

    async def recall(self, message: Recall) -> tuple[Recalled, list[bytes]]:
        """Return the oldest undelivered reply to a request, and the turns of its choices. Raises RequestError."""
        run = await self._ingest.facts(message.run)
        wanted = (run.id, message.rollout, message.request, first_place(message.place))

        def find(c: sqlite3.Connection) -> list[sqlite3.Row]:
            found = c.execute(FIND, wanted).fetchone()
            if found is None:
                return []
            resume_delivery(c, run.id, found["response_id"])
            return c.execute(READ, (run.id, found["response_id"])).fetchall()

        rows = await self._store.write(find)
        used = any(row["turn"] is None and row["blob"] is None for row in rows)
        if used or not rows:
            return Recalled(number=message.number), []
        turns = await anyio.to_thread.run_sync(lambda: [read_turn(self._blobs, row) for row in rows])
        return Recalled(number=message.number, response_id=rows[0]["response_id"]), turns
