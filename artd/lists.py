"""Rows for clients: those of `tables`, newest first, values as JSON knows them.

Owner of: nothing. Invariants: read-only connections only; no payloads, no blobs.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from artd_schema import client_api as api

from . import tables
from .core.states import TRANSITIONS
from .errors import Invalid, NotFound
from .store.store import Store

QUERIES = {
    "runs": tables.RUNS,
    "jobs": tables.JOBS,
    "trajectories": tables.TRAJECTORIES,
    "groups": tables.GROUPS,
    "batches": tables.BATCHES,
    "checkpoints": tables.CHECKPOINTS,
    "pushes": tables.PUSHES,
    "workers": tables.WORKERS,
    "events": tables.EVENTS,
}
ENTITIES = {
    "runs": "run",
    "jobs": "job",
    "trajectories": "trajectory",
    "groups": "trajectory_group",
    "batches": "batch",
    "checkpoints": "checkpoint",
    "pushes": "push",
    "workers": "process",
}
"""Whose states the rows of a table have."""


async def read_rows(store: Store, op: api.List) -> list[dict[str, Any]]:
    """Rows of `op.what`, newest first. Errors: NotFound for an unknown table or run, Invalid for a state that none can have."""
    if op.what not in QUERIES:
        raise NotFound(f"nothing is listed as {op.what!r}; {', '.join(QUERIES)} are", field="what")
    _check_states(op)
    conditions: list[str] = []
    values: list[Any] = []
    if op.what != "workers":  # neither numbered nor of one run
        conditions.append("id > ?")
        values.append(op.after)
        if op.run:
            if op.what != "runs" and not await store.read("SELECT 1 FROM run WHERE name = ?", (op.run,)):
                raise NotFound(f"there is no run {op.run!r}; `artctl runs` lists them", field="run")
            conditions.append("name = ?" if op.what == "runs" else "run = ?")
            values.append(op.run)
    if op.states and op.what != "events":
        conditions.append(f"state IN ({','.join('?' * len(op.states))})")
        values.extend(op.states)
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    order = tables.WORKERS_FIRST if op.what == "workers" else "id DESC"
    sql = f"SELECT * FROM ({QUERIES[op.what]}) {where} ORDER BY {order} LIMIT ?"
    return [_plain(row) for row in await store.read(sql, [*values, _bounded(op.limit)])]


async def read_events(store: Store, op: api.Events) -> list[dict[str, Any]]:
    """Events after `op.after`, oldest first."""
    condition = "AND run = ?" if op.run else ""
    values: list[Any] = [op.after, *([op.run] if op.run else []), _bounded(op.limit)]
    rows = await store.read(f"{tables.EVENTS} WHERE id > ? {condition} ORDER BY id LIMIT ?", values)
    return [_plain(row) for row in rows]


def _check_states(op: api.List) -> None:
    known = {state for pair in TRANSITIONS.get(ENTITIES.get(op.what, ""), ()) for state in pair}
    if odd := [state for state in op.states if known and state not in known]:
        raise Invalid(
            f"none of the {op.what} is ever {odd[0]!r}; {', '.join(sorted(known))} are states", field="states"
        )


def _bounded(limit: int) -> int:
    return max(0, min(limit, 10_000))


def _plain(row: sqlite3.Row) -> dict[str, Any]:
    return {key: _value(key, row[key]) for key in row.keys()}  # noqa: SIM118 - sqlite3.Row iterates over values


def _value(key: str, value: Any) -> Any:
    return msgspec.json.decode(value) if key in tables.JSON_COLUMNS and value is not None else value
