"""Pages of the tables that grow with a run, by key: clients (`lists`) and the command line (`cli.read`) read through here.

Owner of: nothing. Invariants: a page costs what it shows and not what the table holds: each filter is an index whose rows
come in the order of their ids, several of them are merged, and the rows themselves are looked up by id. Newest first;
from `after` on, oldest first.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from artd.core.states import TRANSITIONS

from . import selects
from .readonly import snapshot

QUERIES = {
    "runs": selects.RUNS,
    "jobs": selects.JOBS,
    "trajectories": selects.TRAJECTORIES,
    "groups": selects.GROUPS,
    "batches": selects.BATCHES,
    "checkpoints": selects.CHECKPOINTS,
    "pushes": selects.PUSHES,
    "workers": selects.WORKERS,
    "events": selects.EVENTS,
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
MERGED = 100
"""Indexes that one statement merges; SQLite takes 500."""

Arm = tuple[str, tuple[Any, ...]]
"""A condition that an index answers in the order of ids, and its values."""


class Page(NamedTuple):
    """What is asked for. run, group: names, "" = all; states: () = all; before, after: ids, exclusive; after: oldest first."""

    what: str
    run: str = ""
    states: Sequence[str] = ()
    group: str = ""
    before: int | None = None
    after: int | None = None
    limit: int = 100

    @property
    def order(self) -> str:
        return "id DESC" if self.after is None else "id"

    @property
    def bounds(self) -> Arm:
        """The keys that the page may show."""
        keys = (("id > ?", self.after), ("id < ?", self.before))
        given = [(sql, key) for sql, key in keys if key is not None]
        return " AND ".join(sql for sql, _ in given), tuple(key for _, key in given)


def states_of(what: str) -> tuple[str, ...]:
    """Every state that a row of this table can have; () for one without states."""
    return tuple(sorted({state for pair in TRANSITIONS.get(ENTITIES.get(what, ""), ()) for state in pair}))


def read(c: sqlite3.Connection, page: Page) -> list[sqlite3.Row]:
    """The rows of one page, of one snapshot. An unknown run or group has none."""
    page = page._replace(states=tuple(dict.fromkeys(page.states)))  # arms that overlap would fill a page twice
    select = f"SELECT * FROM ({QUERIES[page.what]})"
    if page.what in ("runs", "workers"):
        return _small(c, page, select)
    with snapshot(c):
        ids = _merged(c, page, _arms(c, page))
        sql = f"{select} WHERE id IN (SELECT value FROM json_each(?)) ORDER BY {page.order}"
        return c.execute(sql, (json.dumps(ids),)).fetchall()


def _small(c: sqlite3.Connection, page: Page, select: str) -> list[sqlite3.Row]:
    """Of a table that a run does not grow. Workers are neither numbered nor of one run."""
    conditions = [_in_states(page.states)] if page.states else []
    if page.what == "workers":
        order = selects.WORKERS_FIRST
    else:
        conditions += [page.bounds, *([("name = ?", (page.run,))] if page.run else [])]
        order = page.order
    where, values = _all(conditions)
    return c.execute(f"{select} {where} ORDER BY {order} LIMIT ?", (*values, page.limit)).fetchall()


def _in_states(states: Sequence[str]) -> Arm:
    return f"state IN ({','.join('?' * len(states))})", tuple(states)


def _all(conditions: Iterable[Arm]) -> Arm:
    """All of them, as a WHERE."""
    given = [(sql, values) for sql, values in conditions if sql]
    where = "WHERE " + " AND ".join(sql for sql, _ in given) if given else ""
    return where, tuple(itertools.chain.from_iterable(values for _, values in given))


def _arms(c: sqlite3.Connection, page: Page) -> list[Arm]:
    """The filters, each as one look-up in an index; together they are what is asked for."""
    if page.what == "events":
        return [("run = ?", (page.run,)) if page.run else ("", ())]
    if not (page.run or page.states or page.group):
        return [("", ())]
    named, name = ("WHERE name = ?", (page.run,)) if page.run else ("", ())
    runs = [row[0] for row in c.execute(f"SELECT id FROM run {named}", name)]
    if page.group:
        groups = "SELECT id FROM trajectory_group WHERE run_id = ? AND name = ?"
        found = [row[0] for run in runs for row in c.execute(groups, (run, page.group))]
        filtered, states = _in_states(page.states) if page.states else ("1", ())
        return [(f"group_id = ? AND +{filtered}", (group, *states)) for group in found]
    return [("run_id = ? AND state = ?", (run, state)) for run in runs for state in page.states or states_of(page.what)]


def _merged(c: sqlite3.Connection, page: Page, arms: list[Arm]) -> list[int]:
    """The first ids of all arms, in the page's order."""
    table = ENTITIES.get(page.what, "event")
    found: list[int] = []
    for start in range(0, len(arms), MERGED):
        parts = [_all([arm, page.bounds]) for arm in arms[start : start + MERGED]]
        sql = " UNION ALL ".join(f"SELECT id FROM {table} {where}" for where, _ in parts)
        values = itertools.chain.from_iterable(values for _, values in parts)
        found += [row[0] for row in c.execute(f"{sql} ORDER BY {page.order} LIMIT ?", (*values, page.limit))]
    return sorted(found, reverse=page.after is None)[: page.limit]
