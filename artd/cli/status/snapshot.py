"""Collects the state of a data folder: what `artctl status` prints, as text or JSON.

Everything comes from the database, the lock and /proc. Only a live daemon serves steps and has ready workers, so a dead one
shows none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from artd.cli import read, show
from artd.cli.daemon_probe import Daemon, data_dir_option, find_daemon
from artd.cli.health import find_problem
from artd.cli.show import Row, iso, span, stamp_times
from artd.store.version import BUG, REMEDY, wal_reset_bug
from artd_schema.paths import boot_id, process_ticks
from artd_schema.run.spec_defaults import spec_value

from .problems import Problem, advice, engine_label, find_problems

GROUP_STATES = ("open", "sealed", "packed", "trained", "discarded")
JOB_STATES = ("queued", "running", "succeeded", "quarantined", "cancelled")


RUNS_SHOWN = 50
"""The most runs that one look reads."""
ROLLOUTS_COUNTED = 10_000
"""The most rollouts of a state that one look counts."""
UNPACKED_OF = 2000
"""How many of the newest trajectories are counted. So status stays quick, and problems that were solved disappear."""


class StatusWarning(NamedTuple):
    """A problem that needs no action now. `text` explains it; `brief` is a line for the terminal."""

    text: str
    brief: str


class Snapshot:
    """The state of a data folder. `health`: ok, degraded or down; `run`: the run that is not finished, else the newest one."""

    def __init__(self, data: Path, found: Daemon) -> None:
        self.data = data
        self.daemon = found
        self.database = False
        self.meta: dict[str, str] = {}
        self.run: Row | None = None
        self.runs: list[Row] = []
        self.groups: dict[str, dict[str, dict[str, int]]] = {}
        self.rollouts: dict[str, int] = {}
        self.jobs: dict[str, int] = {}
        self.active: list[Row] = []
        self.workers: list[Row] = []
        self.pushes: list[Row] = []
        self.events: list[Row] = []
        self.disk_free = 0
        self.unpacked = 0
        self.unwell: Problem | None = None
        self.problems: list[Problem] = []
        self.lacking = 0

    @property
    def clean(self) -> bool:
        """Whether the last daemon stopped in order."""
        return self.meta.get("clean") == "1"

    @property
    def waiting(self) -> str:
        """Why a due job is not sent to the trainer, "" when no job is held back."""
        held = [str(job["waiting"]) for job in self.active if job["state"] == "queued" and job["waiting"]]
        return held[0] if held and self.daemon.running else ""

    @property
    def warnings(self) -> list[StatusWarning]:
        found = [_too_long(self)] if self.unpacked else []
        version = self.meta.get("sqlite", "")
        if version and wal_reset_bug(version):
            said = f"SQLite {version} {BUG}"
            found.append(StatusWarning(f"{said}. Next: {REMEDY}", f"{said.partition(' (')[0]}; artd doctor says more"))
        return found

    @property
    def health(self) -> str:
        return "down" if not self.daemon.running else "degraded" if self.problems else "ok"


def take(data: Path) -> Snapshot:
    """Read a data folder. A folder without a database gives an empty snapshot."""
    shot = Snapshot(data, find_daemon(data))
    if (data / read.DATABASE).exists():
        database = read.Database(data)
        try:
            _fill(shot, database)
        finally:
            database.close()
        disk = os.statvfs(data)
        shot.disk_free = disk.f_bavail * disk.f_frsize
    shot.unwell = find_problem(data, shot.daemon)
    shot.problems = find_problems(shot)
    shot.lacking = lacking(shot)
    return shot


def _fill(shot: Snapshot, database: read.Database) -> None:
    shot.database = True
    shot.meta = {row["key"]: row["value"] for row in database.rows(read.META)}
    runs = database.rows(read.RUNS, limit=RUNS_SHOWN)
    for run in runs if not shot.daemon.running else ():
        run["served"] = -1
    if runs:
        shot.run = runs[0]
        shot.runs = [run for run in runs if run["state"] != "finished"]
        name = shot.run["name"]
        number = shot.run["id"]
        counted = database.rows(read.GROUP_COUNTS, run=number)
        shot.groups = {split: _group_counts(counted, split) for split in ("train", "eval")}
        for state in ("open", "expired"):
            counted = database.rows(read.ROLLOUT_COUNT, run=number, state=state, limit=ROLLOUTS_COUNTED)
            shot.rollouts[state] = int(counted[0]["count"])
        shot.unpacked = database.rows(read.UNPACKED, run=number, limit=UNPACKED_OF)[0]["dropped"]
        shot.run["engines"] = spec_value(shot.run["spec"], "engine", "replicas")
        shot.pushes = database.page("pushes", run=name, limit=3 * shot.run["engines"])
        counted = database.rows(read.JOB_COUNTS, run=number)
        shot.jobs = read.counts(counted, JOB_STATES, "count")
        shot.jobs["retrying"] = int(database.rows(read.RETRYING, run=number)[0]["count"])
        for state in ("running", "quarantined", "queued"):
            shot.active += database.page("jobs", run=name, states=(state,), limit=5)
    shot.workers = database.rows(read.WORKERS)
    serving = database.rows(read.SERVING) if shot.daemon.running else []
    for worker in shot.workers:
        worker["alive"] = _alive(worker)
        worker["serving"] = [
            row["name"] for row in serving if row["engine"] == worker["name"] and row["state"] == "live"
        ]
    if shot.run is not None:
        mine = {worker["name"] for worker in shot.workers if worker["run"] == shot.run["name"]}
        newest = {row["engine"] for row in serving if row["step"] == shot.run["served"] and row["state"] == "live"}
        shot.run["serving"] = len(mine & newest)
    shot.events = database.rows(read.RECENT_EVENTS, limit=5)


def _group_counts(rows: list[Row], split: str) -> dict[str, dict[str, int]]:
    mine = [row for row in rows if row["split"] == split]
    groups, inside = (read.counts(mine, GROUP_STATES, column) for column in ("groups", "trajectories"))
    return {state: {"groups": groups[state], "trajectories": inside[state]} for state in GROUP_STATES}


def _alive(worker: Row) -> bool:
    if worker["pid"] is None or worker["boot_id"] not in ("", boot_id()):
        return False
    return process_ticks(worker["pid"]) == worker["ticks"]


def _too_long(shot: Snapshot) -> StatusWarning:
    """Warn of sequences longer than row_length. Short rows are fine until a sequence does not fit, because nothing is cut."""
    run = shot.run
    assert run is not None
    longest = spec_value(run["spec"], "engine", "max_model_len")
    rows = spec_value(run["spec"], "row_length") or longest
    wanted = f" of {longest} (engine.max_model_len)" if longest > rows else ""
    what = (
        f"of the newest {UNPACKED_OF} trajectories {shot.unpacked} of run {run['name']} were not trained, or not as a whole: a"
        f" sequence of theirs does not fit row_length {rows}"
    )
    return StatusWarning(
        f"{what}. Next: artctl trajectories --state discarded{data_dir_option(shot.data)}; shorter answers (max_tokens), or another run"
        f" with a row_length{wanted}: a spec never changes",
        f"{shot.unpacked} trajectories do not fit row_length {rows} and were not trained as a whole: shorter answers, or another run with"
        f" a row_length{wanted or ' that they fit'}",
    )


def doing(shot: Snapshot) -> str:
    """Return one clause: what is going on now, or what artd waits for."""
    if shot.daemon.state in ("starting", "draining"):
        return f"the daemon is {shot.daemon.state}"
    run = shot.run
    if run is None:
        return "nothing; there is no run yet"
    if run["state"] != "active":
        return f"nothing; run {run['name']} is {run['state']}"
    was = "" if shot.daemon.running else "was "
    for job in shot.active:
        if job["state"] == "running":
            made = f"training step {job['step']}" if job["kind"] == "train" else "making checkpoint 0"
            since = f" ({span(show.now_ms() - job['started'])})" if shot.daemon.running and job["started"] else ""
            return f"{was}{made}{since}"
    sending = [push for push in shot.pushes if push["state"] == "sending"]
    if shot.daemon.running and sending:
        into = ", ".join(sorted(engine_label(push) for push in sending if push["step"] == sending[0]["step"]))
        return f"pushing step {sending[0]['step']} into {into}"
    if shot.waiting:
        return f"waiting for disk space: {shot.waiting}"
    if any(job["state"] == "queued" for job in shot.active):
        return f"{was}waiting for the trainer to take a job"
    train = shot.groups["train"]
    if not shot.daemon.running:
        return "was waiting for rollouts"
    if run["served"] < run["step"]:
        return f"waiting for an engine to serve step {run['step']}"
    need, sealed = spec_value(run["spec"], "groups_per_step"), train["sealed"]["groups"]
    told = f"waiting for rollouts: {sealed} of {need} trainable groups, {train['open']['groups']} open"
    if not train["open"]["groups"]:
        return told
    full = train["open"]["groups"] * spec_value(run["spec"], "group_size")
    return f"{told} with {train['open']['trajectories']} of {full} trajectories"


def _lag(run: Row) -> int | None:
    """Return how many committed steps the served one is behind, None when none is served."""
    return max(0, run["step"] - run["served"]) if run["served"] >= 0 else None


def lacking(shot: Snapshot) -> int:
    """Return how many more groups the next step needs, 0 when it waits for something else."""
    run = shot.run
    if run is None or not doing(shot).startswith("waiting for rollouts"):
        return 0
    return max(0, spec_value(run["spec"], "groups_per_step") - shot.groups["train"]["sealed"]["groups"])


def content(shot: Snapshot) -> dict[str, Any]:
    """Return the JSON document without its head (docs/cli-json.md)."""
    told = shot.daemon.file
    run = shot.run and stamp_times({k: v for k, v in shot.run.items() if k != "spec"}) | {"lag": _lag(shot.run)}
    return {
        "health": shot.health,
        "doing": doing(shot),
        "next": advice(shot),
        "problems": [{"what": p.what, "next": p.next} for p in shot.problems],
        "warnings": [each.text for each in shot.warnings],
        "daemon": {
            "state": shot.daemon.state,
            "pid": told.pid if told else None,
            "version": told.version if told else None,
            "started": told.started if told else None,
            "started_iso": iso(told.started) if told else None,
            "url": (told.url or None) if told and shot.daemon.running else None,
            "clean": shot.clean if not shot.daemon.running else None,
            "sqlite": shot.meta.get("sqlite"),
        },
        "disk_free": shot.disk_free,
        "run": run,
        "runs": [{key: run[key] for key in _RUN} | {"lag": _lag(run)} for run in shot.runs],
        "groups": shot.groups,
        "rollouts": shot.rollouts,
        "jobs": shot.jobs,
        "active_jobs": [stamp_times({k: job[k] for k in _JOB}) for job in shot.active],
        "workers": [stamp_times({k: worker[k] for k in _WORKER}) for worker in shot.workers],
        "events": [stamp_times(event) for event in shot.events],
    }


_JOB = ("id", "kind", "step", "state", "fence", "attempts", "worker", "waiting", "error", "created", "started")
_RUN = ("id", "name", "state", "step", "served")
_WORKER = ("name", "kind", "run", "replica", "state", "alive", "pid", "spawn", "restarts", "serving", "error", "since")
