"""How a job ends without a checkpoint.

Owner of: job rows on their way to queued, quarantined and cancelled, with their attempts' evidence. Invariants: whatever
ends a job settles its batch in the same transaction; no job of a finished run waits for ever.
"""

from __future__ import annotations

import sqlite3

from artd.core.decide import after_failure
from artd.store.store import emit, move

from . import pauses

DISCARDED = "its batch was discarded (artctl discard {})"
FINISHED = "the run was finished"


def end_attempt(c: sqlite3.Connection, now: int, job: sqlite3.Row, failure: str, error: str, evidence: str = "") -> str:
    """Take a running job out of `running` after `failure` (see core.decide.after_failure). evidence: the end of the
    worker's log, or the failure's stack. Returns its new state."""
    outcome = "interrupted" if failure in ("killed", "full") else failure
    c.execute(
        "UPDATE attempt SET ended = ?, outcome = ?, error = ?, evidence = ? WHERE job_id = ? AND fence = ?",
        (now, "cancelled" if job["cancel"] else outcome, error, evidence, job["id"], job["fence"]),
    )
    run = c.execute("SELECT id, name FROM run WHERE id = ?", (job["run_id"],)).fetchone()
    if job["cancel"]:
        abandon(c, now, job, run["name"], bool(job["discard"]))
        return "cancelled"
    ending = after_failure(failure, job["attempts"], job["deaths"])
    move(c, "job", job["id"], ending.state, start="running", worker=None, attempts=ending.attempts, deaths=ending.deaths,
         not_before=now + ending.delay_ms, error=error)  # fmt: skip
    verb = "quarantined" if ending.pause else "requeued"
    emit(c, now, run["name"], f"job.{verb}", job["id"], failure=failure, error=error)
    if ending.pause:
        why = error.splitlines()[0] if error else failure
        pauses.hold(c, now, run["id"], pauses.of_job(job["id"]), f"job {job['id']} is quarantined: {why}")
    return ending.state


def abandon(c: sqlite3.Connection, now: int, job: sqlite3.Row, run: str, discard: bool = False) -> None:
    """End a job for good. Its batch is abandoned; its trajectories and groups wait again, or with `discard`, or when the run
    is finished, are never trained and keep the batch's number."""
    move(c, "job", job["id"], "cancelled", worker=None, ended=now, cancel=1, discard=int(discard))
    if job["batch_id"] is not None:
        move(c, "batch", job["batch_id"], "abandoned", start="packed")
        (finished,) = c.execute("SELECT state = 'finished' FROM run WHERE id = ?", (job["run_id"],)).fetchone()
        over = discard or bool(finished)
        why = DISCARDED.format(job["id"]) if discard else FINISHED
        state, reason = ("discarded", why) if over else ("sealed", "")
        c.execute(
            "UPDATE trajectory_group SET state = ?, reason = ? WHERE state = 'packed' AND id IN"
            " (SELECT group_id FROM trajectory WHERE batch_id = ?)",
            (state, reason, job["batch_id"]),
        )
        state = "discarded" if over else "queued"
        c.execute(
            "UPDATE trajectory SET state = ?, reason = ?, batch_id = iif(?, batch_id, NULL)"
            " WHERE batch_id = ? AND state = 'packed'",
            (state, reason, over, job["batch_id"]),
        )
    emit(c, now, run, "job.discarded" if discard else "job.cancelled", job["id"])


def give_up(c: sqlite3.Connection, now: int, run_id: int, run: str) -> None:
    """The run is finished, and none of its jobs will be done. One that runs ends with its worker."""
    c.execute("UPDATE job SET cancel = 1 WHERE run_id = ? AND state = 'running'", (run_id,))
    waiting = c.execute("SELECT * FROM job WHERE run_id = ? AND state IN ('queued', 'quarantined')", (run_id,))
    for job in waiting.fetchall():
        abandon(c, now, job, run)
