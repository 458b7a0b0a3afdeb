"""Writes of the tables `job` and `attempt`, and how a job ends without a checkpoint. Whatever ends a job settles its
batch in the same transaction; no job of a finished run waits for ever."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from artd.core.decide import after_failure
from artd.store.store import emit, move

from . import pauses
from .batches import abandon_batch
from .groups import release_groups
from .trajectories import release_trajectories

DISCARDED = "its batch was discarded (artctl discard {})"
FINISHED = "the run was finished"


def end_attempt(c: sqlite3.Connection, now: int, job: sqlite3.Row, failure: str, error: str, evidence: str = "") -> str:
    """Take a running job out of `running` after `failure` (see core.decide.after_failure), and return its new state.
    `evidence` is the end of the worker's log, or the failure's stack."""
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
        abandon_batch(c, job["batch_id"])
        (finished,) = c.execute("SELECT state = 'finished' FROM run WHERE id = ?", (job["run_id"],)).fetchone()
        over = discard or bool(finished)
        why = DISCARDED.format(job["id"]) if discard else FINISHED
        reason = why if over else ""
        release_groups(c, job["batch_id"], over=over, reason=reason)
        release_trajectories(c, job["batch_id"], over=over, reason=reason)
    emit(c, now, run, "job.discarded" if discard else "job.cancelled", job["id"])


def give_up(c: sqlite3.Connection, now: int, run_id: int, run: str) -> None:
    """Cancel all unfinished jobs of a run that is finished. A running one ends with its worker."""
    c.execute("UPDATE job SET cancel = 1 WHERE run_id = ? AND state = 'running'", (run_id,))
    waiting = c.execute("SELECT * FROM job WHERE run_id = ? AND state IN ('queued', 'quarantined')", (run_id,))
    for job in waiting.fetchall():
        abandon(c, now, job, run)


# ---- single writes --------------------------------------------------------------------------------------------------


def insert_init_job(c: sqlite3.Connection, now: int, run: int | None) -> None:
    """Queue the job that makes a run's first checkpoint."""
    c.execute(
        "INSERT INTO job (run_id, kind, step, epoch, state, created) VALUES (?, 'init', 0, 0, 'queued', ?)", (run, now)
    )


def insert_train_job(
    c: sqlite3.Connection, now: int, run: sqlite3.Row, step: int, batch: int | None, learning: bytes, metrics: bytes,
    seconds: bytes,
) -> None:  # fmt: skip
    """Queue the job that trains a batch, from the run's newest checkpoint and with its next epoch. `learning`: JSON."""
    c.execute(
        "INSERT INTO job (run_id, kind, step, epoch, batch_id, parent_id, state, learning, metrics, seconds, created)"
        " VALUES (?, 'train', ?, ?, ?, ?, 'queued', ?, ?, ?, ?)",
        (run["id"], step, run["next_epoch"], batch, run["checkpoint_id"], learning, metrics, seconds, now),
    )


def start_job(c: sqlite3.Connection, now: int, job: int, fence: int, worker: str, spawn: int) -> None:
    move(c, "job", job, "running", start="queued", fence=fence, worker=worker, spawn=spawn, started=now, waiting="")


def note_waiting(c: sqlite3.Connection, job: int, why: str) -> None:
    """Set why a queued job that is due is not sent to its trainer, "" when nothing holds it back."""
    c.execute("UPDATE job SET waiting = ? WHERE id = ?", (why, job))


def insert_attempt(c: sqlite3.Connection, now: int, job: int, fence: int, worker: str, spawn: int) -> None:
    c.execute(
        "INSERT INTO attempt (job_id, fence, worker, spawn, started) VALUES (?, ?, ?, ?, ?)",
        (job, fence, worker, spawn, now),
    )


def succeed_job(c: sqlite3.Connection, now: int, job: sqlite3.Row, metrics: bytes, seconds: bytes) -> None:
    """End a job with its attempt."""
    move(c, "job", job["id"], "succeeded", start="running", worker=None, ended=now, error="", metrics=metrics,
         seconds=seconds)  # fmt: skip
    c.execute(
        "UPDATE attempt SET ended = ?, outcome = 'succeeded' WHERE job_id = ? AND fence = ?",
        (now, job["id"], job["fence"]),
    )


def order_cancel(c: sqlite3.Connection, job: int, discard: bool) -> None:
    """Ask for the end of a running job: its worker answers, or dies."""
    c.execute("UPDATE job SET cancel = 1, discard = ? WHERE id = ?", (int(discard), job))


def retry_job(c: sqlite3.Connection, job: int) -> None:
    """Queue a quarantined job. The fence stays as it is: the next claim's is above every attempt's."""
    move(c, "job", job, "queued", start="quarantined", attempts=0, deaths=0, not_before=0)


def delay_job(c: sqlite3.Connection, job: int, not_before: int) -> None:
    c.execute("UPDATE job SET not_before = ? WHERE id = ?", (not_before, job))


def renumber_job(c: sqlite3.Connection, job: int, run: int, leap: int) -> None:
    """Raise the job's fence by `leap`, and give it the run's next epoch."""
    c.execute(
        "UPDATE job SET fence = fence + ?, epoch = (SELECT next_epoch FROM run WHERE id = ?) WHERE id = ?",
        (leap, run, job),
    )


def forget_parents(c: sqlite3.Connection, checkpoints: Sequence[tuple[int]]) -> None:
    """Take these checkpoints from the jobs that went on from them."""
    c.executemany("UPDATE job SET parent_id = NULL WHERE parent_id = ?", checkpoints)


def delete_jobs(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM attempt WHERE job_id = ?", ids)
    c.executemany("DELETE FROM job WHERE id = ?", ids)
