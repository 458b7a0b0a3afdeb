"""Rows for clients: pages of `pages`, values as JSON knows them.

Owner of: nothing. Invariants: the connections of clients only, which have a deadline; no payloads, no blobs.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from artd.errors import Invalid, NotFound
from artd.store import pages, selects
from artd.store.store import Store
from artd_schema import client_api as api

BYTES = 4 << 20
"""Of the JSON in one answer, about: what clients wrote beside their trajectories is theirs to size."""


async def read_rows(store: Store, op: api.List) -> api.Rows:
    """One page of `op.what`. Errors: NotFound for an unknown table or run, Invalid for a state that none can have."""
    if op.what not in pages.QUERIES:
        raise NotFound(f"nothing is listed as {op.what!r}; {', '.join(pages.QUERIES)} are", field="what")
    _check_states(op)
    if op.run and op.what not in ("runs", "workers"):
        await _require_run(store, op.run)
    page = pages.Page(
        op.what,
        op.run,
        op.states if op.what != "events" else (),
        before=op.before,
        after=op.after,
        limit=_bounded(op.limit),
    )
    return await store.ask(lambda c: _answer(pages.read(c, page)))


async def _require_run(store: Store, name: str) -> None:
    """Errors: NotFound."""
    if not await store.read("SELECT 1 FROM run WHERE name = ?", (name,)):
        raise NotFound(f"there is no run {name!r}; `artctl runs` lists them", field="run")


def _answer(rows: list[sqlite3.Row]) -> api.Rows:
    """As many rows as an answer may have."""
    left = BYTES
    shown: list[dict[str, Any]] = []
    for row in rows:
        left -= sum(len(row[key]) for key in row.keys() if isinstance(row[key], bytes))  # noqa: SIM118
        if left < 0 and shown:
            break
        shown.append(_plain(row))
    return api.Rows(rows=shown, more=len(shown) < len(rows))


async def read_events(store: Store, op: api.Events) -> api.Rows:
    """Events after `op.after`, oldest first."""
    page = pages.Page("events", op.run, after=op.after, limit=_bounded(op.limit))
    return await store.ask(lambda c: _answer(pages.read(c, page)))


def _check_states(op: api.List) -> None:
    known = pages.states_of(op.what)
    if odd := [state for state in op.states if known and state not in known]:
        raise Invalid(f"none of the {op.what} is ever {odd[0]!r}; {', '.join(known)} are states", field="states")


def _bounded(limit: int) -> int:
    return max(0, min(limit, 10_000))


def _plain(row: sqlite3.Row) -> dict[str, Any]:
    return {key: _value(key, row[key]) for key in row.keys()}  # noqa: SIM118 - sqlite3.Row iterates over values


def _value(key: str, value: Any) -> Any:
    return msgspec.json.decode(value) if key in selects.JSON_COLUMNS and value is not None else value
