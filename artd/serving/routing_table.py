"""Derives the gateway's routing table from rows, and sends the whole table whenever it changes.

Owns the last table that was sent, and the names that the gateway confirmed. Every table holds an engine under a merged
push from before its pause until its verified `Live`. A table never names a step that is not live.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

import anyio
import msgspec

from artd.net.router import WorkerWire
from artd.store.store import Store
from artd.store.views import active_runs, route_shape, stored_spec
from artd_schema.run.spec import RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import GATEWAY

ENGINES = """
SELECT name, state, address, held FROM process WHERE run_id = ? AND kind = 'engine' ORDER BY replica"""


Routed = dict[str, frozenset[str]]
"""The engines that the gateway sends requests to, by the name (`RUN@STEP`) that they serve."""


class Router:
    """Keeps the gateway's table up to date, and knows what the gateway confirmed."""

    def __init__(self, store: Store, wire: WorkerWire) -> None:
        self._store = store
        self._wire = wire
        self._seq = 0
        self._sent: tuple[int | None, bytes] = (None, b"")
        self._names: Routed = {}
        self.routed: Routed = {}

    async def run(self) -> None:
        """Send every new table to the gateway, until cancelled."""
        while True:
            changed = self._store.change()
            table = await self._store.write(load_table)
            names = _names(table)
            if self.routed.keys() <= names.keys():
                self.routed = {name: engines & names[name] for name, engines in self.routed.items()}
            else:
                # The gateway may still route by the old table, and a rollback may give an old name to another step.
                self.routed = {}
            sent = (self._wire.spawn(GATEWAY), msgspec.msgpack.encode(table))
            if sent[0] is not None and sent != self._sent:
                self._seq += 1
                if self._wire.send(GATEWAY, w.Route(seq=self._seq, runs=table.runs, engines=table.engines)):
                    self._sent, self._names = sent, names
            with anyio.move_on_after(5.0):
                await changed.wait()

    def confirm(self, message: w.RouteTaken) -> None:
        """Note that the gateway routes by this table now, and wake the clients that wait for a step to be served."""
        if message.seq == self._seq:
            self.routed = self._names
            self._store.announce()


class Table(NamedTuple):
    """What the gateway has to know. `held` has, for each engine, the fence of the newest push for which the gateway was
    asked to hold it. A hold ends only with a newer table, so every such push must change the table."""

    runs: tuple[str, ...] = ()
    engines: tuple[w.EngineRoute, ...] = ()
    held: tuple[int, ...] = ()


def load_table(c: sqlite3.Connection) -> Table:
    """Return the active runs, and those of their engines that can be reached."""
    runs = active_runs(c)
    routes: list[w.EngineRoute] = []
    held: list[int] = []
    for run in runs:
        spec = stored_spec(run)
        for row in c.execute(ENGINES, (run["id"],)).fetchall():
            held.append(row["held"])
            if row["state"] == "ready" and row["address"]:
                routes.append(_engine(c, row, run, spec))
    return Table(tuple(run["name"] for run in runs), tuple(routes), tuple(held))


def _names(table: Table) -> Routed:
    names = {served.name for engine in table.engines for served in engine.served}
    return {
        name: frozenset(e.engine for e in table.engines if any(served.name == name for served in e.served))
        for name in names
    }


def _engine(c: sqlite3.Connection, row: sqlite3.Row, run: sqlite3.Row, spec: RunSpec) -> w.EngineRoute:
    sending = c.execute(
        "SELECT 1 FROM push WHERE engine = ? AND state = 'sending' AND mode = 'merged' AND fence = ?",
        (row["name"], row["held"]),
    )
    served = c.execute(
        "SELECT s.name, k.step, k.epoch FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id"
        " WHERE s.engine = ? AND s.run_id = ? AND s.state = 'live' ORDER BY k.epoch",
        (row["name"], run["id"]),
    )
    return w.EngineRoute(
        engine=row["name"],
        socket=row["address"],
        mode=spec.rollout_weights_mode,
        base_model=run["name"] if spec.rollout_weights_mode == "merged" else f"{run['name']}@base",
        max_model_len=spec.engine.max_model_len,
        served=tuple(w.Served(name=s["name"], run=run["name"], step=s["step"], epoch=s["epoch"]) for s in served),
        hold=sending.fetchone() is not None,
        routes=route_shape(run),
        kind=spec.engine.kind,
        grammar=spec.engine.grammar,
    )
