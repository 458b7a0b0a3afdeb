"""How far a run is on the way to a step that a client waits for, read from committed rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping

import msgspec

from artd.core.decide import RunView, is_stalled
from artd.core.fleet import engines_of
from artd.errors import NotFound, RequestError
from artd.packing import failures
from artd.store.views import load_run, stored_spec
from artd.supervise.postmortem import telling
from artd_schema.wire import client_api as api
from artd_schema.wire.worker_names import label

from .waits import Key

Routed = Mapping[str, Collection[str]]
"""The engines that the gateway confirmed to send requests to, by the name (`RUN@STEP`) that they serve."""
WORKERS = """
SELECT name, kind, replica, state, error, since FROM process WHERE (run_id = :run OR run_id IS NULL)"""
"""The workers that a run needs: its own, and the gateway."""
TOLD = 16
"""`Stalled` explains at most this many of the newest discarded groups."""


def find_progress(c: sqlite3.Connection, key: Key, routed: Routed, now: int = 0) -> api.Answer:
    """Return what ends a wait for `key`, or Pending. Raises NotFound, and RequestError when the step will not come."""
    name, step, engines = key
    row = c.execute("SELECT id, name, spec, state, reason, checkpoint_id FROM run WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise NotFound(f"there is no run {name!r}", field="run")
    run = load_run(c, row["id"])
    if run.step >= step and _is_served(c, row, key, routed):
        return _step_info(c, row["id"], name, step)
    if hopeless := _hopeless(c, row, run, step):
        what = f": {row['reason']}" if row["reason"] else ""
        raise RequestError(f"run {name!r} is {run.state}{what}; step {step} will not {hopeless}. Next: artctl status")
    if is_stalled(run, step):
        sealed = len(run.sealed)
        return api.Stalled(
            step=run.step,
            sealed=sealed,
            trainable=sealed,
            needed=run.groups_per_step,
            discarded=_count_discarded(c, row["id"]),
        )
    phase = run.job or ("serve" if run.step >= step else "collect")
    return api.Pending(
        step=run.step,
        phase=phase,
        problem=_broken_worker(c, row["id"], engines == "all") or _packing_problem(c, row["id"]),
        doing=_doing(c, now, row["id"], phase, step),
    )


def served_step(c: sqlite3.Connection, run_id: int) -> int:
    """Return the newest step that an engine of the run serves, -1 when there is none."""
    return max(_served_steps(c, run_id).values(), default=-1)


def _served_steps(c: sqlite3.Connection, run_id: int) -> dict[str, int]:
    """Return the newest step of each engine that serves one."""
    rows = c.execute(
        "SELECT s.engine, max(k.step) AS step FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id"
        " WHERE s.run_id = ? AND s.state = 'live' GROUP BY s.engine",
        (run_id,),
    )
    return {row["engine"]: int(row["step"]) for row in rows}


def _is_served(c: sqlite3.Connection, run: sqlite3.Row, key: Key, routed: Routed) -> bool:
    """Return whether the first engine, or every one, serves the step or a newer one, and the gateway answers with it."""
    name, step, engines = key
    steps = _served_steps(c, run["id"])
    if engines == "first":
        served = max(steps.values(), default=-1)
        return served > step or (served == step and _is_routed(c, run["id"], f"{name}@{step}", routed))
    return all(
        steps.get(engine, -1) > step
        or (
            steps.get(engine) == step
            and _is_routed(c, run["id"], f"{name}@{step}", routed)
            and engine in routed[f"{name}@{step}"]
        )
        for engine in engines_of(run["id"], stored_spec(run))
    )


def _is_routed(c: sqlite3.Connection, run_id: int, name: str, routed: Routed) -> bool:
    """Return whether the gateway routes to this step, and to no step that a rollback left."""
    left = c.execute("SELECT name FROM serving WHERE run_id = ? AND state = 'draining'", (run_id,))
    return name in routed and not any(row["name"] in routed for row in left)


def _count_discarded(c: sqlite3.Connection, run_id: int) -> dict[str, int]:
    """Return why the newest groups of a run were discarded, with the number of groups for each reason."""
    rows = c.execute(
        "SELECT reason, count(*) AS groups FROM (SELECT reason FROM trajectory_group WHERE run_id = ? AND state = 'discarded'"
        " ORDER BY id DESC LIMIT ?) GROUP BY reason ORDER BY groups DESC, reason",
        (run_id, TOLD),
    )
    return {row["reason"]: row["groups"] for row in rows}


def _doing(c: sqlite3.Connection, now: int, run_id: int, phase: str, step: int) -> str:
    """Describe for people what a wait is waiting for: a worker that starts, otherwise the phase."""
    job = c.execute("SELECT started FROM job WHERE run_id = ? AND state = 'running'", (run_id,)).fetchone()
    since = f", {max(0, now - job['started']) // 1000} s" if job and job["started"] else ""
    row = c.execute(f"{WORKERS} AND state = 'starting' ORDER BY name LIMIT 1", {"run": run_id}).fetchone()
    if row is not None and phase != "collect":
        return f"{label(row['kind'], row['replica'])} starting, {max(0, now - row['since']) // 1000} s"
    return {"collect": f"waiting for groups of step {step}", "serve": f"bringing step {step} into the engine",
            "init": f"making the first checkpoint{since}", "train": f"training step {step}{since}"}.get(phase, phase)  # fmt: skip


def _broken_worker(c: sqlite3.Connection, run_id: int, all_engines: bool) -> str:
    """Return which worker that the wait needs is not started any more, and why; "" when there is none. Unless all engines are needed, one
    that is not broken is enough."""
    workers = c.execute(f"{WORKERS} ORDER BY name", {"run": run_id}).fetchall()
    spare = not all_engines and any(row["kind"] == "engine" and row["state"] != "broken" for row in workers)
    for row in workers:
        if row["state"] == "broken" and not (spare and row["kind"] == "engine"):
            return f"{label(row['kind'], row['replica'])} is broken: {telling(row['error'])}"
    return ""


def _packing_problem(c: sqlite3.Connection, run: int) -> str:
    """Return why the packer fails again and again on the run's next batch, "" when it does not."""
    told = failures.failing(c, run)
    if told is None or told["tries"] < 2:
        return ""
    return f"step {told['step']} cannot be packed: {telling(told['error'])}"


def _hopeless(c: sqlite3.Connection, row: sqlite3.Row, run: RunView, step: int) -> str:
    """Return what cannot happen to a step while the run stays in its state ("come" or "be served"); "" when it can
    still be served."""
    if run.state == "active":
        return ""
    if run.step < step:
        return "come"
    failed = c.execute(
        "SELECT 1 FROM pause p JOIN push q ON p.cause = 'push ' || q.id WHERE p.run_id = ? AND q.checkpoint_id = ?",
        (row["id"], row["checkpoint_id"]),
    ).fetchone()
    return "be served" if run.state == "finished" or failed else ""


def _step_info(c: sqlite3.Connection, run_id: int, name: str, step: int) -> api.StepInfo:
    row = c.execute(
        "SELECT k.sha, j.metrics, j.seconds FROM checkpoint k JOIN job j ON j.id = k.job_id WHERE k.run_id = ? AND k.step = ?"
        " AND k.abandoned = 0",
        (run_id, step),
    ).fetchone()
    return api.StepInfo(
        run=name,
        step=step,
        checkpoint=row["sha"],
        metrics=msgspec.json.decode(row["metrics"]),
        seconds=msgspec.json.decode(row["seconds"]),
    )
