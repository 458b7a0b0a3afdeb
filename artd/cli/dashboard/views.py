"""What the dashboard shows, as values for JSON. Each function opens the database, reads, and closes it.

They raise CliError as the verbs of `artctl` do: NOT_FOUND, NOT_RUNNING when no daemon ever ran there, FAILED when the file cannot
be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from artd.cli import read, show
from artd.cli.artctl.metrics import LAST, STEPS
from artd.cli.outcome import NOT_FOUND, USAGE, CliError
from artd.cli.show import Row
from artd.cli.status import snapshot
from artd.cli.texts.load import load
from artd.store import pages
from artd_schema.wire.worker_names import label, parse_worker

POINTS = 5000
"""The most steps of one curve; older ones are left out."""
ROWS = 200
"""The most rows of one page of a table."""
ROLLOUTS = """
SELECT batch_id, min(created) AS first, max(created) AS last FROM trajectory
WHERE batch_id IN (SELECT value FROM json_each(:batches)) GROUP BY batch_id"""


@contextmanager
def _open(data: Path) -> Iterator[read.Database]:
    database = read.Database(data)
    try:
        yield database
    finally:
        database.close()


def overview(data: Path) -> dict[str, Any]:
    """Return the content of `artctl status --json` (docs/cli-json.md)."""
    return {"at": show.now_ms(), "data_dir": str(data)} | snapshot.content(snapshot.take(data))


def runs(data: Path) -> list[Row]:
    """Return the runs, newest first, without their specs."""
    with _open(data) as database:
        rows = database.page("runs", limit=ROWS)
    return [{key: row[key] for key in ("id", "name", "state", "reason", "step", "created")} for row in rows]


def curves(data: Path, run: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of a run's committed steps, oldest first.

    `steps`, `created` and each list of `metrics` and `seconds` have one item a step, None where a step lacks the value. `known`: every
    metric of the run; names: those wanted, () for all.
    """
    with _open(data) as database:
        rows = database.rows(STEPS, run=database.require_run(run), first=0, last=LAST, limit=POINTS)
    rows = [row for row in reversed(rows) if row["metrics"]]
    known = sorted({name for row in rows for name in row["metrics"]})
    phases = sorted({name for row in rows for name in row["seconds"]})
    wanted = [name for name in known if name in names] if names else known
    return {
        "run": run,
        "steps": [row["step"] for row in rows],
        "created": [row["created"] for row in rows],
        "known": known,
        "metrics": {name: [row["metrics"].get(name) for row in rows] for name in wanted},
        "seconds": {name: [row["seconds"].get(name) for row in rows] for name in phases},
    }


def timeline(data: Path, run: str, limit: int) -> list[Row]:
    """Return bars of the newest steps: `lane` (rollouts, packer, the trainer or an engine), `kind`, `step`, `start` and `end` (ms; `end` None: it goes
    on), `state` and `ref`."""
    with _open(data) as database:
        name = database.require_run(run)
        batches = database.page("batches", run=name, limit=limit)
        sampled = database.rows(ROLLOUTS, batches=json.dumps([row["id"] for row in batches]))
        jobs = database.page("jobs", run=name, limit=limit)
        pushes = database.page("pushes", run=name, limit=2 * limit)
    steps = {row["id"]: row for row in batches}
    bars: list[Row] = []
    for row in sampled:
        batch = steps[row["batch_id"]]
        ref = f"batch {batch['id']}"
        bars.append(_bar("rollouts", "rollouts", batch["step"], row["first"], row["last"], batch["state"], ref))
        bars.append(_bar("packer", "pack", batch["step"], row["last"], batch["created"], batch["state"], ref))
    bars += [
        _bar("trainer", job["kind"], job["step"], job["started"], job["ended"], job["state"], f"job {job['id']}")
        for job in jobs
        if job["started"]
    ]
    bars += [
        _bar(
            _engine(push["engine"]),
            "push",
            push["step"],
            push["started"],
            _push_end(push),
            push["state"],
            f"push {push['id']}",
        )
        for push in pushes
        if push["started"]
    ]
    return sorted(bars, key=lambda bar: bar["start"])


def _push_end(push: Row) -> int | None:
    """Return when the phases of a push were over: `ended` of one that went live is when a newer one replaced it."""
    return push["started"] + int(1000 * sum(push["seconds"].values())) if push["seconds"] else push["ended"]


def _engine(name: str) -> str:
    worker = parse_worker(name)
    return label(worker.kind, worker.replica)


def _bar(lane: str, kind: str, step: int, start: int, end: int | None, state: str, ref: str) -> Row:
    return {"lane": lane, "kind": kind, "step": step, "start": start, "end": end, "state": state, "ref": ref}


def table(data: Path, what: str, asked: dict[str, Any]) -> list[Row]:
    """Return one page of a table. asked: fields of `pages.Page`. Raises CliError(NOT_FOUND, USAGE)."""
    if what not in pages.QUERIES or what == "runs":
        raise CliError(NOT_FOUND, f"there is no table {what!r}: there are {', '.join(sorted(pages.QUERIES))}")
    known = pages.states_of(what)
    if strange := set(asked.get("states", ())) - set(known):
        raise CliError(USAGE, f"{what} have no state {', '.join(sorted(strange))}: there are {', '.join(known)}")
    with _open(data) as database:
        database.require_run(asked.get("run", ""))
        return database.page(what, **asked)


def trajectory(data: Path, number: int) -> dict[str, Any]:
    """Return a trajectory's row with its sequences: messages and tokens. Raises CliError(NOT_FOUND)."""
    with _open(data) as database:
        rows = database.page("trajectories", after=number - 1, limit=1)
        if not rows or rows[0]["id"] != number:
            raise CliError(NOT_FOUND, f"there is no trajectory {number}")
        found = load(database, data, rows[0])
    told = {"advantage": found.advantage, "problem": found.missing or found.untold}
    return found.row | told | {"sequences": [msgspec.to_builtins(passage) for passage in found.passages]}
