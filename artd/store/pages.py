"""Reads the tables page by page, by key, for clients (`lists`) and the command line (`cli.read`).

The cost of a page depends on the rows that it shows, never on the size of the table. Each filter is an index that gives
rows in the order of their ids; one statement merges several such indexes and then looks the rows up by id. A page shows
the newest rows first; with `after` it shows the oldest first.
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
    "rollouts": selects.ROLLOUTS,
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
    "rollouts": "rollout",
    "batches": "batch",
    "checkpoints": "checkpoint",
    "pushes": "push",
    "workers": "process",
}
"""The table whose states a page's rows have."""
MERGED = 100
"""The most indexes that one statement merges; SQLite allows 500."""

Arm = tuple[str, tuple[Any, ...]]
"""A condition that an index answers in the order of ids, and the condition's values."""


class Page(NamedTuple):
    """A request for rows. `run` and `group` are names, "" means all; `states` () means all. `before` and `after` are
    exclusive ids; with `after` the oldest rows come first. `split`: of trajectories, "" means both."""

    what: str
    run: str = ""
    states: Sequence[str] = ()
    group: str = ""
    before: int | None = None
    after: int | None = None
    limit: int = 100
    split: str = ""

    @property
    def order(self) -> str:
        return "id DESC" if self.after is None else "id"

    @property
    def bounds(self) -> Arm:
        """The range of ids that the page may show."""
        keys = (("id > ?", self.after), ("id < ?", self.before))
        given = [(sql, key) for sql, key in keys if key is not None]
        return " AND ".join(sql for sql, _ in given), tuple(key for _, key in given)


def states_of(what: str) -> tuple[str, ...]:
    """Return every state that a row of this table can have, () for a table without states."""
    return tuple(sorted({state for pair in TRANSITIONS.get(ENTITIES.get(what, ""), ()) for state in pair}))


def read(c: sqlite3.Connection, page: Page) -> list[sqlite3.Row]:
    """Return the rows of one page from one snapshot. An unknown run or group has no rows."""
    page = page._replace(states=tuple(dict.fromkeys(page.states)))  # a repeated state would repeat its rows
    select = f"SELECT * FROM ({QUERIES[page.what]})"
    if page.what in ("runs", "workers"):
        return _read_small(c, page, select)
    with snapshot(c):
        ids = read_ids(c, page)
        sql = f"{select} WHERE id IN (SELECT value FROM json_each(?)) ORDER BY {page.order}"
        return c.execute(sql, (json.dumps(ids),)).fetchall()


def read_ids(c: sqlite3.Connection, page: Page) -> list[int]:
    """Return the ids of the rows of one page, in its order."""
    return _merge_ids(c, page, _split_filters(c, page))


def _read_small(c: sqlite3.Connection, page: Page, select: str) -> list[sqlite3.Row]:
    """Return the rows of a table that does not grow with a run. Workers have no id and belong to no run."""
    conditions = [_in_states(page.states)] if page.states else []
    if page.what == "workers":
        order = selects.WORKERS_FIRST
    else:
        conditions += [page.bounds, *([("name = ?", (page.run,))] if page.run else [])]
        order = page.order
    where, values = _join_conditions(conditions)
    return c.execute(f"{select} {where} ORDER BY {order} LIMIT ?", (*values, page.limit)).fetchall()


def _in_states(states: Sequence[str]) -> Arm:
    return f"state IN ({','.join('?' * len(states))})", tuple(states)


def _join_conditions(conditions: Iterable[Arm]) -> Arm:
    """Return a WHERE clause that requires all conditions, "" for none, and its values."""
    given = [(sql, values) for sql, values in conditions if sql]
    where = "WHERE " + " AND ".join(sql for sql, _ in given) if given else ""
    return where, tuple(itertools.chain.from_iterable(values for _, values in given))


def _split_filters(c: sqlite3.Connection, page: Page) -> list[Arm]:
    """Split the page's filters into look-ups of one index each; the union of their rows is what the page asks for."""
    if page.what == "events":
        return [("run = ?", (page.run,)) if page.run else ("", ())]
    if not (page.run or page.states or page.group or page.split):
        return [("", ())]
    named, name = ("WHERE name = ?", (page.run,)) if page.run else ("", ())
    runs = [row[0] for row in c.execute(f"SELECT id FROM run {named}", name)]
    if page.group:
        groups = "SELECT id FROM trajectory_group WHERE run_id = ? AND name = ?"
        found = [row[0] for run in runs for row in c.execute(groups, (run, page.group))]
        filtered, states = _in_states(page.states) if page.states else ("1", ())
        if page.split:
            filtered, states = f"{filtered} AND split = ?", (*states, page.split)
        return [(f"group_id = ? AND +{filtered}", (group, *states)) for group in found]
    if page.split == "eval":
        filtered, chosen = _in_states(page.states) if page.states else ("1", ())
        return [(f"run_id = ? AND split = 'eval' AND +{filtered}", (run, *chosen)) for run in runs]
    split, value = (" AND split = ?", (page.split,)) if page.split else ("", ())
    wanted = page.states or states_of(page.what)
    return [(f"run_id = ? AND state = ?{split}", (run, state, *value)) for run in runs for state in wanted]


def _merge_ids(c: sqlite3.Connection, page: Page, arms: list[Arm]) -> list[int]:
    """Return the first ids of all arms, in the page's order."""
    table = ENTITIES.get(page.what, "event")
    found: list[int] = []
    for start in range(0, len(arms), MERGED):
        parts = [_join_conditions([arm, page.bounds]) for arm in arms[start : start + MERGED]]
        sql = " UNION ALL ".join(f"SELECT id FROM {table} {where}" for where, _ in parts)
        values = itertools.chain.from_iterable(values for _, values in parts)
        found += [row[0] for row in c.execute(f"{sql} ORDER BY {page.order} LIMIT ?", (*values, page.limit))]
    return sorted(found, reverse=page.after is None)[: page.limit]
