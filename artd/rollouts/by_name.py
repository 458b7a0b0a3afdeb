"""Submits a rollout by its name: its responses become one trajectory, in the order of the requests (docs/adr/0006).

What was superseded, or lost on its way to the client, is in no trajectory. A rollout that is submitted or expired takes no more
responses. A trajectory holds the rows that the rollout had when it was closed, because that transaction compares them again.
"""

from __future__ import annotations

import sqlite3

from artd.errors import Conflict, NotFound, RequestError
from artd.store.store import Store
from artd.tables.exchanges import supersede_lost
from artd.tables.rollouts import mark_submitted, touch_rollout
from artd_schema.wire import client_api as api

from . import by_reference
from .insert import Parcel, RunFacts

FIND = "SELECT id, state, trajectory_id FROM rollout WHERE run_id = ? AND name = ?"
TAKEN = "e.rollout_id = ? AND e.trajectory_id IS NULL AND e.split = ? AND e.delivery IN ('pending', 'delivered')"
ORDER = "e.place, e.choice"
IDS = f"SELECT e.id FROM exchange e WHERE {TAKEN} ORDER BY {ORDER} LIMIT ?"
READ = (
    "SELECT e.id, e.response_id, e.choice, e.turn, e.blob, e.split, e.trajectory_id, r.next_epoch FROM exchange e"
    f" JOIN run r ON r.id = e.run_id WHERE {TAKEN} ORDER BY {ORDER} LIMIT ?"
)


class Changed(RequestError):
    """A response came while the trajectory was being composed; compose it again."""

    code = "busy"


async def read_responses(store: Store, op: api.Submit, run: RunFacts) -> list[sqlite3.Row]:
    """Return the ledger's rows of the rollout, in the order of their requests. Raises NotFound and Conflict."""
    rollout = _require_open(await store.read(FIND, (run.id, op.rollout)), op)
    rows = await store.read(READ, (rollout, op.split, api.MOST_REFS + 1))
    if not rows:
        raise Conflict(
            f"rollout {op.rollout!r} has no response of split {op.split!r} that its program has: all were lost, broken or made for"
            " another split; ask again under its URL, or leave it to expire",
            field="rollout",
        )
    if len(rows) > api.MOST_REFS:
        raise Conflict(
            f"rollout {op.rollout!r} has more than {api.MOST_REFS} responses; submit them in parts, by responses=[...]",
            field="rollout",
        )
    return rows


def insert(
    c: sqlite3.Connection, now: int, parcel: Parcel, exchanges: list[sqlite3.Row], problem: RequestError | None
) -> api.Submitted:
    """Insert the trajectory of a rollout, and close the rollout. `problem` as in `by_reference.insert`. Raises RequestError."""
    op, run = parcel.op, parcel.run
    rollout = None
    if not c.execute("SELECT 1 FROM trajectory WHERE run_id = ? AND key = ?", (run.id, parcel.key)).fetchone():
        rollout = _require_open(c.execute(FIND, (run.id, op.rollout)).fetchall(), op)
        found = [row[0] for row in c.execute(IDS, (rollout, op.split, api.MOST_REFS + 1))]
        if problem is None and found != [row["id"] for row in exchanges]:
            raise Changed(f"rollout {op.rollout!r} gets responses all the time; submit it when its program is done")
    outcome = by_reference.insert(c, now, parcel, exchanges, problem)
    if rollout is not None:
        supersede_lost(c, rollout)
        mark_submitted(c, rollout, outcome.trajectory)
    return outcome


def enter_response(c: sqlite3.Connection, now: int, run: RunFacts, name: str) -> int:
    """Note in its rollout that a response comes, and return the rollout's id. Raises Conflict when the rollout is closed."""
    found = c.execute(FIND, (run.id, name)).fetchone()
    if found is not None and found["state"] != "open":
        raise Conflict(f"{_describe_end(name, found)}; take another name for another rollout", field="rollout")
    return touch_rollout(c, now, run.id, name)


def _require_open(found: list[sqlite3.Row], op: api.Submit) -> int:
    """Return the rollout's id. Raises NotFound and Conflict."""
    if not found:
        raise NotFound(
            f"run {op.run!r} has no rollout {op.rollout!r}: no response was served under its URL or headers (run.rollout(...) gives both)",
            field="rollout",
        )
    if found[0]["state"] != "open":
        raise Conflict(_describe_end(op.rollout, found[0]), field="rollout")
    return int(found[0]["id"])


def _describe_end(name: str, rollout: sqlite3.Row) -> str:
    if rollout["state"] == "submitted":
        return f"rollout {name!r} is trajectory {rollout['trajectory_id']} already"
    return (
        f"rollout {name!r} has expired: it was not submitted within retention.exchanges_days of its last response, or the ledger was"
        " over retention.exchanges_gib"
    )
