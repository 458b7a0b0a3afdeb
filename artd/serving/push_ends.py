"""Updates the rows of an engine's pushes, and of what it serves, when a push ends or the engine is gone.

Each function writes in its caller's transaction.
"""

from __future__ import annotations

import sqlite3

from artd.store.store import emit
from artd.tables import pauses
from artd.tables.pushes import fail_push, retry_push, supersede_push
from artd.tables.served import mark_gone

MAX_ATTEMPTS = 5


def make_room(c: sqlite3.Connection, engine: str, name: str, keep: int) -> list[str]:
    """End what an engine serves beyond the newest `keep` live steps, and everything that a rollback left. Returns the
    names that the engine must unload. `name` is not one of them: the new step was loaded in its place."""
    served = c.execute(
        "SELECT id, name, state FROM serving WHERE engine = ? AND state <> 'gone' ORDER BY id DESC", (engine,)
    ).fetchall()
    stays = [row for row in served if row["name"] != name and row["state"] == "live"][:keep]
    gone = [row for row in served if row not in stays]
    for row in gone:
        mark_gone(c, row["id"])
    return [row["name"] for row in gone if row["name"] != name]


def engines_with_pushes(c: sqlite3.Connection) -> list[str]:
    """Return the engines that have a push under way or a live one, or that serve something."""
    rows = c.execute(
        "SELECT engine FROM push WHERE state IN ('sending', 'live') UNION SELECT engine FROM serving WHERE state IN ('live', 'draining')"
    )
    return [row["engine"] for row in rows]


def forget_engine(c: sqlite3.Connection, now: int, engine: str, error: str, counted: bool = True) -> None:
    """Forget what a dead process of an engine served, and put its push back. `counted` says whether that push failed;
    it is False when the daemon itself went down during the push."""
    for row in c.execute("SELECT * FROM push WHERE engine = ? AND state = 'sending'", (engine,)).fetchall():
        put_back(c, now, row, error, counted)
    for row in c.execute("SELECT id FROM push WHERE engine = ? AND state = 'live'", (engine,)).fetchall():
        supersede_push(c, now, row["id"], "live")
    for row in c.execute("SELECT id FROM serving WHERE engine = ? AND state <> 'gone'", (engine,)).fetchall():
        mark_gone(c, row["id"])


def put_back(c: sqlite3.Connection, now: int, row: sqlite3.Row, error: str, counted: bool = True) -> None:
    """Return a failed push to `prepared`. After too many failures in a row the push becomes `failed` and its run
    pauses. Failures of older pushes count, too, because a step that is committed meanwhile replaces the one whose push
    failed."""
    attempts = row["attempts"] + counted
    failures = attempts + failures_before(c, row)
    run = c.execute("SELECT id, name FROM run WHERE id = ?", (row["run_id"],)).fetchone()
    if failures < MAX_ATTEMPTS:
        retry_push(c, row["id"], attempts, error)
        emit(c, now, run["name"], "push.retried", row["id"], error=error, attempts=attempts)
        return
    fail_push(c, now, row["id"], attempts, error)
    emit(c, now, run["name"], "push.failed", row["id"], error=error)
    more = " in a row, with those of older steps" if failures > attempts else ""
    why = error.splitlines()[0] if error else "no reason given"
    pauses.hold(c, now, run["id"], f"push {row['id']}", f"push {row['id']} failed {failures} times{more}: {why}")


def failures_before(c: sqlite3.Connection, row: sqlite3.Row) -> int:
    """Count the failures of older pushes to the same engine since one of them was live, or since the operator resumed
    the run after its last failed push."""
    ended = "state = 'failed' OR (state IN ('live', 'superseded') AND source IS NOT NULL AND error = '')"
    found = c.execute(
        "SELECT coalesce(sum(attempts), 0) FROM push WHERE run_id = :run AND engine = :engine AND id < :id AND id >"
        f" (SELECT coalesce(max(id), 0) FROM push WHERE run_id = :run AND engine = :engine AND id < :id AND ({ended}))",
        {"run": row["run_id"], "engine": row["engine"], "id": row["id"]},
    )
    return int(found.fetchone()[0])
