"""Updates the rows of an engine's pushes, and of what it serves, when a push ends or the engine is gone.

Each function writes in its caller's transaction.
"""

from __future__ import annotations

import sqlite3

from artd.core.fleet import EngineHealth, engines_of, may_serve
from artd.store.store import emit
from artd.store.views import stored_spec, unreadable
from artd.tables import pauses
from artd.tables.pushes import fail_push, retry_push, supersede_push
from artd.tables.served import mark_gone

MAX_ATTEMPTS = 5
DELAY_MS, LONGEST_DELAY_MS = 10_000, 300_000
"""A bad engine gets another push after this time, twice as long after each failure, while others serve."""


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
    """Return a failed push to `prepared`. After too many failures in a row it is tried again later and later while another
    engine of the run may serve. When none may, the push becomes `failed` and the run pauses. Failures of older pushes
    count, too, because a step that is committed meanwhile replaces the one whose push failed."""
    attempts = row["attempts"] + counted
    failures = failures_in_a_row(c, row["run_id"], row["engine"]) + counted
    run = c.execute("SELECT id, name, spec FROM run WHERE id = ?", (row["run_id"],)).fetchone()
    if failures < MAX_ATTEMPTS or not counted or _has_other(c, run, row["engine"]):
        wait = min(DELAY_MS << (failures - MAX_ATTEMPTS), LONGEST_DELAY_MS) if failures >= MAX_ATTEMPTS else 0
        retry_push(c, row["id"], attempts, error, now + wait if wait else 0)
        emit(
            c,
            now,
            run["name"],
            "push.retried",
            row["id"],
            engine=row["engine"],
            error=error,
            attempts=attempts,
            wait_s=wait // 1000,
        )
        return
    fail_push(c, now, row["id"], attempts, error)
    emit(c, now, run["name"], "push.failed", row["id"], error=error)
    more = " in a row, with those of older steps" if failures > attempts else ""
    why = error.splitlines()[0] if error else "no reason given"
    pauses.hold(c, now, run["id"], f"push {row['id']}", f"push {row['id']} failed {failures} times{more}: {why}")


def _has_other(c: sqlite3.Connection, run: sqlite3.Row, engine: str) -> bool:
    """Return whether another engine of the run serves, or may do so."""
    if unreadable(run):
        return False
    others = [name for name in engines_of(run["id"], stored_spec(run)) if name != engine]
    return any(may_serve(_health(c, run["id"], name), MAX_ATTEMPTS) for name in others)


def _health(c: sqlite3.Connection, run: int, engine: str) -> EngineHealth:
    serves = c.execute("SELECT 1 FROM serving WHERE engine = ? AND state = 'live' LIMIT 1", (engine,)).fetchone()
    broken = c.execute("SELECT 1 FROM process WHERE name = ? AND state = 'broken'", (engine,)).fetchone()
    return EngineHealth(serves is not None, failures_in_a_row(c, run, engine), broken is not None)


def failures_in_a_row(c: sqlite3.Connection, run: int, engine: str) -> int:
    """Count the failures of pushes to an engine since one of them was live, or since the operator resumed the run after
    its last failed push."""
    ended = "state = 'failed' OR (state IN ('live', 'superseded') AND source IS NOT NULL AND error = '')"
    found = c.execute(
        "SELECT coalesce(sum(attempts), 0) FROM push WHERE run_id = :run AND engine = :engine AND id >"
        f" (SELECT coalesce(max(id), 0) FROM push WHERE run_id = :run AND engine = :engine AND ({ended}))",
        {"run": run, "engine": engine},
    )
    return int(found.fetchone()[0])
