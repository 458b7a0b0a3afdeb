"""How a job ends without a checkpoint, and what an operator does about one: cancel, discard, retry.

Owner of: job rows on their way to queued, quarantined and cancelled, with their attempts' evidence. Invariants: whatever
ends a job settles its batch in the same transaction; fences only rise, so a late result of an older attempt is nobody's;
asking again for what was done already changes nothing.
"""

from __future__ import annotations

import sqlite3

from .core.decide import after_failure
from .errors import Conflict, NotFound
from .runs import set_run_state
from .store.store import emit, move

DISCARDED = "its batch was discarded (artctl discard {})"


def end_attempt(c: sqlite3.Connection, now: int, job: sqlite3.Row, failure: str, error: str, evidence: str = "") -> str:
    """Take a running job out of `running` after `failure` (see core.decide.after_failure). evidence: the end of the
    worker's log, or the failure's stack. Returns its new state."""
    outcome = "interrupted" if failure == "killed" else failure
    c.execute(
        "UPDATE attempt SET ended = ?, outcome = ?, error = ?, evidence = ? WHERE job_id = ? AND fence = ?",
        (now, "cancelled" if job["cancel"] else outcome, error, evidence, job["id"], job["fence"]),
    )
    run = c.execute("SELECT id, name, state FROM run WHERE id = ?", (job["run_id"],)).fetchone()
    if job["cancel"]:
        abandon(c, now, job, run["name"], bool(job["discard"]))
        return "cancelled"
    ending = after_failure(failure, job["attempts"], job["deaths"])
    move(c, "job", job["id"], ending.state, start="running", worker=None, attempts=ending.attempts, deaths=ending.deaths,
         not_before=now + ending.delay_ms, error=error)  # fmt: skip
    verb = "quarantined" if ending.pause else "requeued"
    emit(c, now, run["name"], f"job.{verb}", job["id"], failure=failure, error=error)
    if ending.pause and run["state"] == "active":
        why = error.splitlines()[0] if error else failure
        move(c, "run", run["id"], "paused", reason=f"job {job['id']} is quarantined: {why}")
        emit(c, now, run["name"], "run.paused", run["name"], reason=f"job {job['id']} quarantined")
    return ending.state


def abandon(c: sqlite3.Connection, now: int, job: sqlite3.Row, run: str, discard: bool = False) -> None:
    """End a job for good. Its batch is abandoned; its trajectories and groups wait again, or with `discard` are never
    trained and keep the batch's number."""
    move(c, "job", job["id"], "cancelled", worker=None, ended=now, cancel=1, discard=int(discard))
    if job["batch_id"] is not None:
        move(c, "batch", job["batch_id"], "abandoned", start="packed")
        state, reason = ("discarded", DISCARDED.format(job["id"])) if discard else ("sealed", "")
        c.execute(
            "UPDATE trajectory_group SET state = ?, reason = ? WHERE state = 'packed' AND id IN"
            " (SELECT group_id FROM trajectory WHERE batch_id = ?)",
            (state, reason, job["batch_id"]),
        )
        state = "discarded" if discard else "queued"
        c.execute(
            "UPDATE trajectory SET state = ?, reason = ?, batch_id = iif(?, batch_id, NULL)"
            " WHERE batch_id = ? AND state = 'packed'",
            (state, reason, discard, job["batch_id"]),
        )
    emit(c, now, run, "job.discarded" if discard else "job.cancelled", job["id"])


# ---- what an operator asks ----------------------------------------------------------------------------------------------


def end_for_good(c: sqlite3.Connection, now: int, job_id: int, discard: bool) -> bool:
    """Cancel or discard a job; whether it runs, and its worker has to be told. Errors: NotFound, Conflict.

    A cancelled job's run pauses, so that its trajectories are not packed at once. A discarded one's goes on, when it was
    the quarantine that had paused it.
    """
    job = find(c, job_id)
    if job["kind"] == "init":
        raise Conflict(f"job {job_id} makes the run's first checkpoint; finish the run instead: artctl finish RUN")
    if job["state"] == "cancelled" and bool(job["discard"]) == discard:
        return False
    if job["state"] in ("cancelled", "succeeded"):
        raise Conflict(f"job {job_id} is {_ended(job)} already: artctl job {job_id}")
    was = job["state"]
    if was == "running":
        if job["cancel"] and bool(job["discard"]) != discard:
            raise Conflict(
                f"job {job_id} is being {_ended(job)} already: wait for it, then look at artctl job {job_id}"
            )
        c.execute("UPDATE job SET cancel = 1, discard = ? WHERE id = ?", (int(discard), job_id))
    else:
        abandon(c, now, job, job["run"], discard)
    if not discard and job["run_state"] == "active":
        set_run_state(c, now, job["run_id"], "paused", f"job {job_id} was cancelled")
    if discard and was == "quarantined" and job["run_state"] == "paused":
        set_run_state(c, now, job["run_id"], "active", "")
    return bool(was == "running")


def retry(c: sqlite3.Connection, now: int, job_id: int) -> None:
    """Queue a quarantined job again on the same batch, and let its run go on. Errors: NotFound, Conflict."""
    job = find(c, job_id)
    if job["state"] != "quarantined":
        raise Conflict(f"job {job_id} is {_ended(job)}; only a quarantined job can be retried")
    if job["run_state"] == "finished":
        raise Conflict(f"run {job['run']!r} is finished; its jobs cannot be retried")
    # The fence stays as it is: the next claim's is above every attempt's.
    move(c, "job", job_id, "queued", start="quarantined", attempts=0, deaths=0, not_before=0)
    emit(c, now, job["run"], "job.retried", job_id)
    if job["run_state"] == "paused":
        set_run_state(c, now, job["run_id"], "active", "")


def find(c: sqlite3.Connection, job_id: int) -> sqlite3.Row:
    """A job with its run's name and state. Errors: NotFound."""
    row: sqlite3.Row | None = c.execute(
        "SELECT j.*, r.name AS run, r.state AS run_state FROM job j JOIN run r ON r.id = j.run_id WHERE j.id = ?",
        (job_id,),
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no job {job_id}; `artctl jobs` lists them", field="job")
    return row


def _ended(job: sqlite3.Row) -> str:
    """A job's state in words."""
    if job["cancel"]:
        return "discarded" if job["discard"] else "cancelled"
    return str(job["state"])
