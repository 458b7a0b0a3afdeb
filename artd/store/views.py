"""Rows as the pure core sees them. Read inside the writer, so that a decision and its write see the same state."""

from __future__ import annotations

import functools
import sqlite3

import msgspec

from artd.core.decide import Group, JobView, PushView, RunView, WorkerView
from artd.errors import Unreadable
from artd_schema.codec import UNREADABLE
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import Learning, RunSpec

from .selects import UNFINISHED

REMEDY = "start the artd that wrote it, or artctl finish {} and make another run"
"""The next step for a run whose spec cannot be read; `{}` is its name."""


@functools.lru_cache(maxsize=16)
def _spec(stored: bytes) -> RunSpec:
    return msgspec.json.decode(stored, type=RunSpec)


@functools.lru_cache(maxsize=16)
def _learning(stored: bytes) -> Learning:
    return msgspec.json.decode(stored, type=Learning)


def stored_spec(run: sqlite3.Row) -> RunSpec:
    """Return the spec of a row with `name` and `spec`. Raises Unreadable."""
    if why := unreadable(run):
        raise Unreadable(f"{why}. Next: {REMEDY.format(run['name'])}")
    return _spec(run["spec"])


def learning_of(run: sqlite3.Row) -> Learning:
    """Return what the next batch of a run (a row with `name`, `spec` and `learning`) is trained with. Raises Unreadable."""
    spec = stored_spec(run)
    return _learning(run["learning"]) if run["learning"] else spec.learning


def unreadable(run: sqlite3.Row) -> str:
    """Return why the spec of a row with `name` and `spec` cannot be read, or its `learning` if it has that, "" when they can."""
    try:
        _spec(run["spec"])
        if "learning" in run.keys() and run["learning"]:  # noqa: SIM118 - a Row iterates over values
            _learning(run["learning"])
    except UNREADABLE as error:
        return f"the spec of run {run['name']!r} cannot be read: {error}"
    return ""


def active_runs(c: sqlite3.Connection) -> list[sqlite3.Row]:
    """Return the runs for which services work, in order of their ids: those that are not finished and whose spec can be read."""
    rows = c.execute(f"SELECT * FROM run WHERE {UNFINISHED} ORDER BY id").fetchall()
    return [row for row in rows if not unreadable(row)]


def active_run_ids(c: sqlite3.Connection) -> list[int]:
    return [row["id"] for row in active_runs(c)]


def active_run(c: sqlite3.Connection, run_id: int) -> sqlite3.Row | None:
    """Return the run if services work for it, see `active_runs`."""
    row: sqlite3.Row | None = c.execute(f"SELECT * FROM run WHERE id = ? AND {UNFINISHED}", (run_id,)).fetchone()
    return None if row is None or unreadable(row) else row


def route_shape(run: sqlite3.Row) -> RouteShape | None:
    """Return the shape of a run's routes, None when it replays no experts."""
    return msgspec.json.decode(run["routes"], type=RouteShape) if run["routes"] else None


def load_run(c: sqlite3.Connection, run_id: int) -> RunView:
    """Return the run, with at most as many of its sealed groups as one batch takes. Raises Unreadable."""
    run = c.execute("SELECT * FROM run WHERE id = ?", (run_id,)).fetchone()
    spec = stored_spec(run)
    job = c.execute(
        "SELECT kind FROM job WHERE run_id = ? AND state IN ('queued', 'running', 'quarantined') ORDER BY id LIMIT 1",
        (run_id,),
    ).fetchone()
    sealed = c.execute(
        "SELECT id, size FROM trajectory_group WHERE run_id = ? AND state = 'sealed' AND split = 'train' ORDER BY id"
        " LIMIT ?",
        (run_id, spec.groups_per_step),
    )
    open_groups = c.execute(
        "SELECT total(groups) FROM group_count WHERE run_id = ? AND state = 'open' AND split = 'train'", (run_id,)
    )
    return RunView(
        state=run["state"],
        step=run["step"],
        groups_per_step=spec.groups_per_step,
        flush=bool(run["flush"]),
        job=job["kind"] if job else "",
        sealed=tuple(Group(row["id"], row["size"]) for row in sealed),
        open_groups=int(open_groups.fetchone()[0]),
    )


def load_worker(c: sqlite3.Connection, name: str) -> WorkerView | None:
    row = c.execute("SELECT name, state, spawn FROM process WHERE name = ?", (name,)).fetchone()
    return WorkerView(row["name"], row["state"], row["spawn"]) if row else None


def queued_jobs(c: sqlite3.Connection, run_id: int) -> list[JobView]:
    rows = c.execute(
        "SELECT id, kind, not_before, cancel FROM job WHERE run_id = ? AND state = 'queued' ORDER BY id", (run_id,)
    )
    return [JobView(row["id"], row["kind"], row["not_before"], bool(row["cancel"])) for row in rows]


def open_pushes(c: sqlite3.Connection, engine: str) -> list[PushView]:
    rows = c.execute(
        "SELECT id, checkpoint_id, state, not_before FROM push WHERE engine = ? AND state IN ('prepared', 'sending', 'live')",
        (engine,),
    )
    return [PushView(row["id"], row["checkpoint_id"], row["state"], row["not_before"]) for row in rows]


def newest_checkpoint(c: sqlite3.Connection, run_id: int) -> sqlite3.Row | None:
    """Return the newest checkpoint of the run's chain."""
    row: sqlite3.Row | None = c.execute(
        "SELECT k.* FROM run r JOIN checkpoint k ON k.id = r.checkpoint_id WHERE r.id = ?", (run_id,)
    ).fetchone()
    return row


def push_failed(c: sqlite3.Connection, run_id: int, engine: str) -> bool:
    """Return whether the newest push of the run's newest checkpoint to this engine failed for good."""
    last = c.execute(
        "SELECT state FROM push WHERE checkpoint_id = (SELECT checkpoint_id FROM run WHERE id = ?) AND engine = ?"
        " ORDER BY id DESC LIMIT 1",
        (run_id, engine),
    ).fetchone()
    return last is not None and last["state"] == "failed"
