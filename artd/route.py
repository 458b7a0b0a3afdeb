"""The gateway's routing table, derived from rows and sent whole whenever it changes.

Owner of: nothing but the last table sent. Invariants: an engine under a merged push is on hold in every table from
before its update until its verified `Live`; a table never names a step that is not live.
"""

from __future__ import annotations

import sqlite3

import anyio
import msgspec

from artd_schema import worker as w
from artd_schema.spec import RunSpec

from .store.store import Store
from .views import active_run
from .wire import WorkerWire

GATEWAY = "gateway"


class Router:
    """Keeps the gateway's table true."""

    def __init__(self, store: Store, wire: WorkerWire) -> None:
        self._store = store
        self._wire = wire
        self._seq = 0
        self._sent: tuple[int | None, bytes] = (None, b"")

    async def run(self) -> None:
        """Send every new table, until cancelled."""
        while True:
            changed = self._store.change()
            runs, engines = await self._store.write(load_table)
            table = (self._wire.spawn(GATEWAY), msgspec.msgpack.encode((runs, engines)))
            if table[0] is not None and table != self._sent:
                self._seq += 1
                if self._wire.send(GATEWAY, w.Route(seq=self._seq, runs=runs, engines=engines)):
                    self._sent = table
            with anyio.move_on_after(5.0):
                await changed.wait()


def load_table(c: sqlite3.Connection) -> tuple[tuple[str, ...], tuple[w.EngineRoute, ...]]:
    """(names of runs, engines that can be reached)."""
    run = active_run(c)
    if run is None:
        return (), ()
    spec = msgspec.json.decode(run["spec"], type=RunSpec)
    engines = c.execute("SELECT name, address FROM process WHERE kind = 'engine' AND state = 'ready' AND address <> ''")
    return (run["name"],), tuple(_engine(c, row, run, spec) for row in engines.fetchall())


def _engine(c: sqlite3.Connection, row: sqlite3.Row, run: sqlite3.Row, spec: RunSpec) -> w.EngineRoute:
    sending = c.execute("SELECT 1 FROM push WHERE engine = ? AND state = 'sending' AND mode = 'merged'", (row["name"],))
    served = c.execute(
        "SELECT s.name, k.step, k.epoch FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id"
        " WHERE s.engine = ? AND s.state = 'live' ORDER BY k.epoch",
        (row["name"],),
    )
    return w.EngineRoute(
        engine=row["name"],
        socket=row["address"],
        mode=spec.rollout_weights_mode,
        base_model=run["name"] if spec.rollout_weights_mode == "merged" else f"{run['name']}@base",
        max_model_len=spec.engine.max_model_len,
        served=tuple(w.Served(name=s["name"], run=run["name"], step=s["step"], epoch=s["epoch"]) for s in served),
        hold=sending.fetchone() is not None,
    )
