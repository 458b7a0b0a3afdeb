"""Finds what keeps artd from working, and the command that helps: every condition of docs/operations.md, `When a run stops by
itself`.

`status`, `jobs` and `job` take their next command from here only. A condition that follows from another one is not reported
twice.
"""

from __future__ import annotations

import ast
import errno
import functools
import json
import re
import shlex
import sqlite3
from typing import TYPE_CHECKING, NamedTuple

from artd.cli.daemon_probe import data_dir_option, start_command
from artd.cli.health import Problem
from artd.cli.show import Row, worker_label, worker_log
from artd.store.fs import is_full
from artd.supervise.postmortem import telling
from artd_schema.wire.worker_names import label, parse_worker

if TYPE_CHECKING:
    from .snapshot import Snapshot

FULL_DISK = 1 << 20


RESTORE = "artd restore BACKUP --data-dir NEW"


def next_for_database(error: Exception) -> str:
    """Return what to do about a database that cannot be read or written."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return RESTORE
    if code == sqlite3.SQLITE_ERROR:  # no such table, no such column
        return "use the artd that made it"
    if code == sqlite3.SQLITE_FULL or is_full(error):
        return "free space on its disk, and make it writable"
    if code == sqlite3.SQLITE_IOERR or getattr(error, "errno", 0) == errno.EIO:
        return "dmesg: its disk fails; then artd check --deep"
    if code == sqlite3.SQLITE_BUSY:
        return "try again"
    return "run this as the daemon's user"


class Choice(NamedTuple):
    """A command, and what it does."""

    command: str
    does: str


def find_problems(shot: Snapshot) -> list[Problem]:
    """Return everything that needs an operator, the most urgent first."""
    if not shot.daemon.running:
        return [Problem("the daemon does not run", start_command(shot.data))]
    where = data_dir_option(shot.data)
    quarantined = [job for job in shot.active if job["state"] == "quarantined"]
    found: list[Problem | None] = [shot.unwell]
    found += [_job(job, where) for job in quarantined]
    waiting = [
        worker for worker in shot.workers if worker["state"] == "backoff"
    ]  # they start again by themselves, so they come last
    found += [_worker(worker, shot.run, where) for worker in shot.workers if worker not in waiting]
    found += [
        _run(shot.run, bool(quarantined), where),
        _pack(shot, where),
        *_pushes(shot.pushes, shot.run, where),
        _disk(shot),
    ]
    found += _report_blamed(shot, where)
    found.append(_retention(shot))
    found += [_worker(worker, shot.run, where) for worker in waiting]
    return [problem for problem in found if problem is not None]


def _worker(worker: Row, run: Row | None, where: str) -> Problem | None:
    name, error = worker_label(worker, run), worker["error"].strip()
    look = f"artctl logs {worker_log(worker, run)}{where}"
    if worker["state"] in ("broken", "backoff"):
        why = f": {telling(error)}" if error else ""
        again = _again(run, error, look, where) if worker["state"] == "broken" and worker["run"] and run else look
        how = "is broken" if worker["state"] == "broken" else "died and is in back-off"
        return Problem(f"{name} {how}{why}", again)
    if worker["state"] == "stopped" and error and run is not None and run["state"] == "active":
        what, _, then = error.partition("Next: ")
        return Problem(f"{name} cannot start: {what.strip()}", then or look)
    return None


def _again(run: Row, error: str, look: str, where: str) -> str:
    """Return what to do about a worker that the daemon has stopped restarting."""
    resume = f"artctl resume {run['name']}{where}"
    if not _spec_errors().search(error):
        return f"{look}, then {resume}"
    finish = f"artctl finish {run['name']}{where}"
    return (
        f"{finish} and another run that asks for what is there (a spec never changes); or get that here, then {resume}"
    )


@functools.cache
def _spec_errors() -> re.Pattern[str]:
    """Match errors for which the run's spec is responsible: they name a field of the spec, or a missing GPU."""
    from msgspec.structs import fields  # imported here, because most calls of `status` do not need it

    from artd_schema.run.spec import EngineSpec, TrainerSpec

    kinds = (("trainer", TrainerSpec), ("engine", EngineSpec))
    asked = [re.escape(f"{of}.{field.name}") for of, kind in kinds for field in fields(kind)]
    return re.compile(
        r"torch sees (no GPU|\d)|Torch not compiled with CUDA|No CUDA GPUs are available|Failed to infer device type"
        rf"|support current device cpu|invalid device ordinal|trainer\.\*_parallel|(?<![\w.])({'|'.join(asked)})\b"
    )


def _job(job: Row, where: str) -> Problem:
    why = f": {job['error'].splitlines()[0]}" if job["error"].strip() else ""
    return Problem(f"job {job['id']} is quarantined{why}", choices(job, where)[0].command)


def choices(job: Row, where: str) -> list[Choice]:
    """Return what an operator can do about a job, the best first; none when it needs nothing.

    `where`: the result of `data_dir_option`.
    """
    number = job["id"]
    if job["state"] in ("queued", "running") and job["attempts"]:
        return [Choice(f"artctl logs trainer{where}", "why it failed before")]
    if job["state"] != "quarantined":
        return []
    retry = Choice(f"artctl retry {number}{where}", "do it again; the run continues")
    if job["kind"] == "init":
        finish = Choice(f"artctl finish {job['run']}{where}", "give the run up; another one may ask for something else")
        return [finish, retry] if job["failure"] == "permanent" else [retry, finish]
    drop = Choice(f"artctl discard {number}{where}", "never train this batch; the run continues without it")
    free = Choice(f"artctl cancel {number}{where}", "pack its trajectories again, after artctl resume")
    # A permanent failure, such as a loss that is not finite, comes again at the next try.
    return [drop, retry, free] if job["failure"] == "permanent" else [retry, drop, free]


def _run(run: Row | None, quarantined: bool, where: str) -> Problem | None:
    if run is None or run["state"] != "paused" or run["reason"] == "operator" or quarantined:
        return None
    told = f"run {run['name']} is paused: {run['reason']}"
    if "cannot be read: " in run["reason"] and run["reason"].startswith("the spec of run "):
        return Problem(
            told, f"start the artd that wrote it, or artctl finish {run['name']}{where} and make another run"
        )
    resume = f"artctl resume {run['name']}{where}"
    if found := re.search(r"group ('.*?'|\".*?\") cannot be packed: ", run["reason"]):
        group = shlex.quote(ast.literal_eval(found[1]))
        return Problem(
            told,
            f"put those bytes back from a backup, then {resume}; or artctl discard-group {run['name']} {group}{where}",
        )
    return Problem(told, resume)


def _pack(shot: Snapshot, where: str) -> Problem | None:
    """Report a batch whose packing fails again and again."""
    told = shot.run["packing"] if shot.run else None
    if not told or told["tries"] < 2:
        return None
    error = (told["error"].splitlines() or ["no reason given"])[0]
    return Problem(f"step {told['step']} cannot be packed: {error}", f"artctl logs daemon{where}")


def _report_blamed(shot: Snapshot, where: str) -> list[Problem]:
    """Report groups that were discarded because the packing code fails on them, until an operator takes note."""
    run = shot.run
    if run is None or run["state"] == "finished":
        return []
    return [
        Problem(
            f"group {one['group']!r} was discarded, because the packer fails on it: {one['error']}",
            f"report it, then artctl discard-group {run['name']} {shlex.quote(one['group'])}{where} takes note of it",
        )
        for one in json.loads(shot.meta.get("packer.blamed") or "[]")
        if one["run"] == run["name"]
    ]


def engine_label(push: Row) -> str:
    """Return what people call the engine of a push."""
    engine = parse_worker(push["engine"])
    return label(engine.kind, engine.replica)


def _pushes(pushes: list[Row], run: Row | None, where: str) -> list[Problem | None]:
    """Report the failure of the newest push to each engine."""
    newest: dict[str, Row] = {}
    for push in pushes:
        if push["error"] and push["state"] != "superseded":
            newest.setdefault(push["engine"], push)
    return [_push(push, run, where) for push in newest.values()]


def _push(push: Row, run: Row | None, where: str) -> Problem | None:
    """Report the failure of a push, unless the pause of its run reports it."""
    several = run is not None and run["engines"] > 1
    what = f"push {push['id']} of step {push['step']}{f' into {engine_label(push)}' if several else ''} failed"
    if push["state"] != "failed":  # it is tried again at the engine's next start, or later while other engines serve
        log = push["engine"] if parse_worker(push["engine"]).replica else "engine"
        return Problem(
            f"{what} {push['attempts']} times and is tried again: {push['error']}", f"artctl logs {log}{where}"
        )
    if run is not None and run["state"] == "paused" and f"push {push['id']} failed" in run["reason"]:
        return None
    then = f"artctl resume {run['name']}{where}" if run and run["state"] == "paused" else f"artctl pushes{where}"
    return Problem(f"{what}: {push['error']}", then)


def _disk(shot: Snapshot) -> Problem | None:
    """Report that space is lacking for intake or training, or that too little is left for the daemon to write anything."""
    why = shot.meta.get("disk") or shot.waiting
    if not why and (not shot.database or shot.disk_free >= FULL_DISK):
        return None
    said = f"{why}; " if why else ""
    free = f"{shot.disk_free >> 20} MiB are free under {shot.data}"
    return Problem(
        f"{said}{free}", f"free disk space there, then artd continues by itself; artctl gc{data_dir_option(shot.data)}"
    )


def _retention(shot: Snapshot) -> Problem | None:
    if not (why := shot.meta.get("retention")):
        return None
    where = data_dir_option(shot.data)
    then = f"artctl gc --dry-run{where}, then artctl gc --resume{where} if the clock is right"
    return Problem(f"nothing is deleted by its age: {why}", then)


def advice(shot: Snapshot) -> str:
    """Return the next command, or that none is needed."""
    if shot.problems:
        return shot.problems[0].next
    if shot.run is None or shot.run["state"] == "finished":
        return "create a run with artd.Client().run(NAME, model=FOLDER)"
    if shot.run["state"] == "paused":
        return f"artctl resume {shot.run['name']}{data_dir_option(shot.data)}"
    if shot.lacking:
        return f"submit {shot.lacking} more group{'s' if shot.lacking > 1 else ''} whose rewards differ"
    return "nothing to do"
