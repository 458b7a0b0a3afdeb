"""Reads rows of the daemon's tables, and follows events, for a client of all runs and for one run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal, get_args

from artd_schema.wire import client_api as api

from .connection import Connection
from .errors import Invalid

Row = dict[str, Any]
Table = Literal["runs", "jobs", "trajectories", "groups", "batches", "checkpoints", "pushes", "workers", "events"]
POLL_S = 30.0


async def read_rows(
    connection: Connection, what: Table, *, run: str = "", states: Sequence[str] = (), before: int | None = None,
    after: int | None = None, limit: int = 100,
) -> list[Row]:  # fmt: skip
    """Return one page of a table, however many answers it takes. Raises Invalid for an unknown table."""
    if what not in get_args(Table):
        raise Invalid(f"unknown listing {what!r}; use one of: {', '.join(get_args(Table))}", "what")
    rows: list[Row] = []
    while True:
        op = api.List(what=what, run=run, states=tuple(states), before=before, after=after, limit=limit - len(rows))
        answer = await connection.ask(op, api.Rows)
        rows += answer.rows
        if not answer.more:
            return rows
        last = int(rows[-1]["id"])  # the rows are too large for one answer; read on from the last one
        before, after = (last, None) if after is None else (before, last)


async def follow_events(connection: Callable[[], Connection], run: str, after: int) -> AsyncGenerator[Row, None]:
    """Yield a run's events with an id above `after`, for ever; all runs' if `run` is "". `connection` returns the open
    connection."""
    while True:
        opened, op = connection(), api.Events(after=after, run=run, timeout_s=POLL_S)
        answer = await opened.ask(op, api.Rows, timeout=POLL_S + opened.timeout)
        for row in answer.rows:
            after = max(after, int(row["id"]))
            yield row
