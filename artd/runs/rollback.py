"""Rolls a run back to an older checkpoint (`rollback RUN@STEP`): the run continues from it in a new lineage.

Runs inside the caller's transaction. A lineage number and a policy epoch are used only once. What the abandoned steps
trained stays trained and is never trained again. Their checkpoints leave the chain, so retention may delete them. The
gateway admits no request to an abandoned step, and the engine gets the older checkpoint by an ordinary push.
"""

from __future__ import annotations

import sqlite3

from artd.errors import Conflict, NotFound
from artd.store.store import emit
from artd.tables.checkpoints import leave_checkpoints
from artd.tables.runs import rewind_run
from artd.tables.served import drain_abandoned
from artd_schema.wire import client_api as api

KEPT = (
    "SELECT step FROM checkpoint WHERE run_id = ? AND abandoned = 0 AND state = 'committed' AND step < ? ORDER BY step"
)
UNFINISHED = "SELECT id, state FROM job WHERE run_id = ? AND state IN ('queued', 'running', 'quarantined') LIMIT 1"


def rollback(c: sqlite3.Connection, now: int, op: api.Rollback) -> None:
    """Make `op.step` the newest step of its run. A repeated request changes nothing. Raises NotFound, Conflict."""
    run = c.execute("SELECT * FROM run WHERE name = ?", (op.run,)).fetchone()
    if run is None:
        raise NotFound(f"there is no run {op.run!r}; `artctl runs` lists them", field="run")
    if run["lineage"] == op.lineage + 1 and _origin(c, run) == op.step:
        return
    target = _target(c, run, op)
    left = leave_checkpoints(c, run["id"], op.step)
    drain_abandoned(c, run["id"])
    lineage = run["lineage"] + 1
    rewind_run(c, run["id"], op.step, target, lineage)
    emit(c, now, run["name"], "run.rolled_back", run["name"], step=op.step, lineage=lineage, left=left)


def _origin(c: sqlite3.Connection, run: sqlite3.Row) -> int:
    """Return the step from which the run's lineage began."""
    first = c.execute(
        "SELECT p.step FROM checkpoint k JOIN checkpoint p ON p.id = k.parent_id WHERE k.run_id = ? AND k.lineage = ?"
        " ORDER BY k.step LIMIT 1",
        (run["id"], run["lineage"]),
    ).fetchone()
    return int(first["step"] if first else run["step"])


def _target(c: sqlite3.Connection, run: sqlite3.Row, op: api.Rollback) -> int:
    """Return the id of the checkpoint to go back to. Raises NotFound, and Conflict that says what to do first."""
    name = f"{run['name']}@{op.step}"
    found = c.execute(
        "SELECT id, state FROM checkpoint WHERE run_id = ? AND step = ? AND abandoned = 0", (run["id"], op.step)
    ).fetchone()
    if run["state"] == "finished":
        kept = f"`artctl export {name} DIR`, or " if found is not None and found["state"] == "committed" else ""
        raise Conflict(f"run {run['name']!r} is finished, and cannot continue: {kept}create another run")
    if run["lineage"] != op.lineage:
        raise Conflict(
            f"run {run['name']!r} was rolled back meanwhile: it is at step {run['step']}; artctl checkpoints"
        )
    if op.step == run["step"]:
        raise Conflict(f"{name} is the newest step already; there is nothing to roll back", field="step")
    kept = ", ".join(f"@{row['step']}" for row in c.execute(KEPT, (run["id"], run["step"]))) or "no older step"
    if found is None:
        raise NotFound(f"there is no checkpoint {name}; it can be rolled back to {kept}", field="step")
    if found["state"] != "committed":
        raise Conflict(
            f"the files of {name} are deleted (keep_checkpoints); it can be rolled back to {kept}", field="step"
        )
    job = c.execute(UNFINISHED, (run["id"],)).fetchone()
    if job is not None:
        raise Conflict(
            f"job {job['id']} is {job['state']}: first `artctl cancel {job['id']}` (its trajectories wait again) or"
            f" `artctl discard {job['id']}` (they are never trained)"
        )
    return int(found["id"])
