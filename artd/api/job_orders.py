"""Carries out what an operator orders about a job: cancel, discard, retry. An order that comes again changes nothing.

Fences only rise, so a late result of an older attempt is ignored.
"""

from __future__ import annotations

import sqlite3

from artd.errors import Conflict, NotFound
from artd.store.store import emit
from artd.tables import pauses
from artd.tables.jobs import abandon, order_cancel, retry_job
from artd.tables.once import first_time


def end_job(c: sqlite3.Connection, now: int, job_id: int, discard: bool) -> bool:
    """Cancel or discard a job. Returns whether it is running, so that its worker must be told.

    Cancelling pauses the run, so that the job's trajectories are not packed again at once. The pause that a quarantine
    caused ends with its job; every other pause stays. Raises NotFound for an unknown job, and Conflict for one that has
    ended or makes the run's first checkpoint.
    """
    job = find(c, job_id)
    if job["kind"] == "init":
        raise Conflict(f"job {job_id} makes the run's first checkpoint; finish the run instead: artctl finish RUN")
    if job["state"] == "cancelled" and bool(job["discard"]) == discard:
        return False
    if job["state"] in ("cancelled", "succeeded"):
        raise Conflict(f"job {job_id} is {_state_words(job)} already: artctl job {job_id}")
    was = job["state"]
    if was == "running":
        if job["cancel"] and bool(job["discard"]) != discard:
            raise Conflict(
                f"job {job_id} is being {_state_words(job)} already: wait for it, then look at artctl job {job_id}"
            )
        order_cancel(c, job_id, discard)
    else:
        abandon(c, now, job, job["run"], discard)
    if not discard:
        pauses.hold(c, now, job["run_id"], f"cancelled job {job_id}", f"job {job_id} was cancelled")
    pauses.lift(c, now, job["run_id"], pauses.of_job(job_id))
    return bool(was == "running")


def retry(c: sqlite3.Connection, now: int, job_id: int, request: str = "") -> None:
    """Queue a quarantined job again on the same batch, and lift the pause that its quarantine caused.

    Raises NotFound for an unknown job, and Conflict for one that is not quarantined or whose run is finished.
    """
    if not first_time(c, now, request):
        return
    job = find(c, job_id)
    if job["state"] != "quarantined":
        raise Conflict(f"job {job_id} is {_state_words(job)}; only a quarantined job can be retried")
    if job["run_state"] == "finished":
        raise Conflict(f"run {job['run']!r} is finished; its jobs cannot be retried")
    retry_job(c, job_id)
    emit(c, now, job["run"], "job.retried", job_id)
    pauses.lift(c, now, job["run_id"], pauses.of_job(job_id))


def find(c: sqlite3.Connection, job_id: int) -> sqlite3.Row:
    """Return a job with its run's name and state. Raises NotFound."""
    row: sqlite3.Row | None = c.execute(
        "SELECT j.*, r.name AS run, r.state AS run_state FROM job j JOIN run r ON r.id = j.run_id WHERE j.id = ?",
        (job_id,),
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no job {job_id}; `artctl jobs` lists them", field="job")
    return row


def _state_words(job: sqlite3.Row) -> str:
    """Return a job's state in words, for error messages."""
    if job["cancel"]:
        return "discarded" if job["discard"] else "cancelled"
    return str(job["state"])
