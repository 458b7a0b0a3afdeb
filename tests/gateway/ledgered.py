"""The rig's daemon with the real ledger behind it: a store, and the services that write, mark and find responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from artd.errors import Conflict
from artd.rollouts.deliveries import Deliveries
from artd.rollouts.ingest import Ingest
from artd.store.blobs import Blobs
from artd.store.store import Store
from artd_schema.data.trajectory import Turn
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.deliveries import Delivery, Recall
from tests.fakes.rows import add_run, data_dir, open_store
from tests.gateway.rig import Daemon, Rig

WIDE = 1 << 21
"""More than any character that the scripted engine says, each of which is a token."""
Hook = Callable[[w.Exchange], Awaitable[None]]


class Ledgered(Daemon):
    """committed: called when an entry is durable, before the gateway hears of it. deaf: the marks of deliveries do not arrive."""

    def __init__(self, store: Store, folder: Path) -> None:
        super().__init__()
        self.store = store
        blobs = Blobs(data_dir(folder).blobs)
        self.ingest = Ingest(store, blobs, 1 << 16)
        self._deliveries = Deliveries(store, self.ingest, blobs)
        self.committed: Hook | None = None
        self.deaf = False
        self._line: asyncio.Task[None] | None = None

    def send(self, message: w.FromWorker, bulk: Sequence[bytes]) -> None:
        self.sent.append(message)
        if isinstance(message, w.Exchange | Delivery | Recall):
            self._line = asyncio.get_running_loop().create_task(self._take(message, list(bulk), self._line))

    async def _take(self, message: w.FromWorker, bulk: list[bytes], before: asyncio.Task[None] | None) -> None:
        match message:
            case w.Exchange():
                try:
                    answer = await self._deliveries.exchange(message, bulk)
                except Conflict as error:
                    answer = w.ExchangeAck(response_id=message.response_id, error=str(error), closed=True)
                if self.committed is not None:
                    await self.committed(message)
                await self.say(answer)
            case Delivery() if not self.deaf:
                await self._deliveries.note(message)
            case Recall():
                told, turns = await self._deliveries.recall(message)
                await self.gateway.handle(told, turns)
        if before is not None:
            await before

    async def settle(self) -> None:
        """Wait until all that the gateway has said until now is in the ledger."""
        if self._line is not None:
            await self._line

    async def deliveries(self) -> list[tuple[str, str]]:
        """(rollout, delivery) of every response, in the order in which the ledger got them."""
        await self.settle()
        sql = "SELECT o.name, e.delivery FROM exchange e JOIN rollout o ON o.id = e.rollout_id ORDER BY e.id"
        return [(row[0], row[1]) for row in await self.store.read(sql)]

    async def submit(self, rollout: str, reward: float = 1.0, group: str = "g", **changes: Any) -> list[Turn]:
        """Submit a rollout; the turns of its trajectory, as the packer reads them."""
        await self.settle()
        op = api.Submit(run="pol", group=group, reward=reward, rollout=rollout, **changes)
        answer = await self.ingest.submit(op, [])
        sql = "SELECT body FROM trajectory_data WHERE trajectory_id = ?"
        (row,) = await self.store.read(sql, (answer.trajectory,))
        return msgspec.msgpack.decode(row["body"], type=list[Turn])


@asynccontextmanager
async def ledgered(rig: Rig, folder: Path) -> AsyncIterator[Ledgered]:
    """Put the ledger behind a rig's gateway. Its run `pol` has an engine's whole vocabulary, and epochs up to 8."""
    async with open_store(folder) as store:
        await add_run(store, "pol", group_size=64)
        await store.write(lambda c: c.execute("UPDATE run SET vocab_size = ?, next_epoch = 8", (WIDE,)))
        daemon = Ledgered(store, folder)
        daemon.seq = rig.daemon.seq
        rig.daemon = daemon
        await rig.start()
        yield daemon


def cut(rig: Rig, rollout: str) -> int:
    """Break the connections on which a rollout's requests wait; how many there were."""
    connections: list[Any] = list(rig.server.server_state.connections)
    waiting = [
        connection
        for connection in connections
        if (cycle := connection.cycle) is not None
        and not cycle.response_complete
        and cycle.scope["path"].startswith(f"/rollouts/{rollout}/")
    ]
    for connection in waiting:
        connection.transport.abort()
    return len(waiting)
