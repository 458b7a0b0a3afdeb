"""Reads pages of rows for clients, with values as JSON has them.

It uses the connections that clients read by, which have a deadline. It lists no payloads and no blobs.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from artd.errors import Invalid, NotFound
from artd.store import pages, selects
from artd.store.store import Store
from artd_schema.wire import client_api as api

BYTES = 4 << 20
"""The JSON in one answer is about this long at most. Clients choose how long the metadata of their trajectories is."""


async def read_rows(store: Store, op: api.List) -> api.Rows:
    """Return one page of `op.what`. Raises NotFound for an unknown table or run, and Invalid for an unknown state."""
    if op.what not in pages.QUERIES:
        raise NotFound(f"unknown listing {op.what!r}; use one of: {', '.join(pages.QUERIES)}", field="what")
    _check_states(op)
    if op.run and op.what not in ("runs", "workers"):
        await require_run(store, op.run)
    page = pages.Page(
        op.what,
        op.run,
        op.states if op.what != "events" else (),
        before=op.before,
        after=op.after,
        limit=_bound(op.limit),
    )
    return await store.ask(lambda c: answer_rows(pages.read(c, page)))


async def require_run(store: Store, name: str) -> None:
    """Raise NotFound when there is no such run."""
    if not await store.read("SELECT 1 FROM run WHERE name = ?", (name,)):
        raise NotFound(f"there is no run {name!r}; `artctl runs` lists them", field="run")


def answer_rows(rows: list[sqlite3.Row]) -> api.Rows:
    """Return as many rows as one answer may hold."""
    left = BYTES
    shown: list[dict[str, Any]] = []
    for row in rows:
        left -= sum(len(row[key]) for key in row.keys() if isinstance(row[key], bytes))  # noqa: SIM118
        if left < 0 and shown:
            break
        shown.append(plain(row))
    return api.Rows(rows=shown, more=len(shown) < len(rows))


async def read_events(store: Store, op: api.Events) -> api.Rows:
    """Return events after `op.after`, oldest first."""
    page = pages.Page("events", op.run, after=op.after, limit=_bound(op.limit))
    return await store.ask(lambda c: answer_rows(pages.read(c, page)))


def _check_states(op: api.List) -> None:
    known = pages.states_of(op.what)
    if odd := [state for state in op.states if known and state not in known]:
        raise Invalid(f"unknown state {odd[0]!r} of {op.what}; use one of: {', '.join(known)}", field="states")


def _bound(limit: int) -> int:
    return max(0, min(limit, 10_000))


def plain(row: sqlite3.Row) -> dict[str, Any]:
    return {key: _value(key, row[key]) for key in row.keys()}  # noqa: SIM118 - sqlite3.Row iterates over values


def _value(key: str, value: Any) -> Any:
    return msgspec.json.decode(value) if key in selects.JSON_COLUMNS and value is not None else value
