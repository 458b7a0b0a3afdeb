"""Keeps why a run is paused: a set of causes, so that lifting one does not undo another.

Writes the table `pause`, and the run's state and reason that follow from it. A run is paused exactly while it has a
cause. The reason of a paused run names every cause, oldest first.
"""

from __future__ import annotations

import sqlite3

from artd.store.store import emit

from .runs import finish_run, pause_run, resume_run, set_reason

OPERATOR = "operator"
"""The cause of `artctl pause`."""
SPEC = "spec"
"""The cause of a run whose spec cannot be read. The next boot that can read the spec lifts it."""


def of_job(job: int) -> str:
    """Return the cause of a quarantined job: `artctl retry` and `artctl discard` lift it."""
    return f"job {job}"


def of_group(group: int) -> str:
    """Return the cause of a group whose stored bytes are damaged: `artctl discard-group` lifts it."""
    return f"group {group}"


def hold(c: sqlite3.Connection, now: int, run_id: int, cause: str, reason: str) -> None:
    """Pause a run for `cause`. A cause that it already has gets this reason. A finished run stays finished."""
    run = _run(c, run_id)
    if run["state"] == "finished":
        return
    known = c.execute("SELECT 1 FROM pause WHERE run_id = ? AND cause = ?", (run_id, cause)).fetchone()
    c.execute(
        "INSERT INTO pause (run_id, cause, reason, created) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (run_id, cause) DO UPDATE SET reason = excluded.reason",
        (run_id, cause, reason, now),
    )
    if run["state"] == "active":
        pause_run(c, run_id)
    _tell_reasons(c, run_id)
    if not known:
        emit(c, now, run["name"], "run.paused", run["name"], cause=cause, reason=reason)


def lift(c: sqlite3.Connection, now: int, run_id: int, cause: str | None = None) -> None:
    """Take away one cause, or every one. The run continues when no cause is left."""
    c.execute("DELETE FROM pause WHERE run_id = ? AND (?2 IS NULL OR cause = ?2)", (run_id, cause))
    run = _run(c, run_id)
    if run["state"] != "paused":
        return
    if c.execute("SELECT 1 FROM pause WHERE run_id = ? LIMIT 1", (run_id,)).fetchone():
        _tell_reasons(c, run_id)
        return
    resume_run(c, run_id)
    emit(c, now, run["name"], "run.resumed", run["name"])


def finish(c: sqlite3.Connection, now: int, run_id: int) -> None:
    """End a run for good."""
    c.execute("DELETE FROM pause WHERE run_id = ?", (run_id,))
    finish_run(c, run_id)
    name = _run(c, run_id)["name"]
    emit(c, now, name, "run.finished", name)


def _run(c: sqlite3.Connection, run_id: int) -> sqlite3.Row:
    row: sqlite3.Row = c.execute("SELECT name, state FROM run WHERE id = ?", (run_id,)).fetchone()
    return row


def _tell_reasons(c: sqlite3.Connection, run_id: int) -> None:
    rows = c.execute("SELECT reason FROM pause WHERE run_id = ? ORDER BY id", (run_id,))
    set_reason(c, run_id, "; ".join(row["reason"] for row in rows))
