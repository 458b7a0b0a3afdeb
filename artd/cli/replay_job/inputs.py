"""Finds what `artd replay-job` needs: the inputs and the result of a job, and whether they still exist.

It reads rows and looks for files by name; it opens only the database, and needs no daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from artd.cli import read
from artd.cli.artctl import job
from artd.cli.outcome import CONFLICT, FAILED, NOT_FOUND, CliError
from artd.cli.package_code import committed_code
from artd.datadir.layout import DataDir
from artd.errors import Conflict
from artd.models.base_model import check_pinned
from artd_schema.data.base import BaseModel
from artd_schema.data.manifest import MANIFEST_FILE
from artd_schema.run.spec import Learning, RunSpec
from artd_schema.wire.replay_job import ReplayRequest
from artd_schema.wire.worker import CheckpointRef, Run
from artd_schema.wire.worker_config import TrainerConfig

Row = read.Row
_NAMED = 5
_LOOKED_AT = 1000
_BLOBS = (
    ("tensors", "its batch"), ("manifest", "its batch's manifest"), ("replay", "its replay bundle"),
    ("replay_manifest", "its replay bundle's manifest"),
)  # fmt: skip


def find(database: read.Database, data: Path, number: int) -> Row:
    """Return the row (of read.REPLAYABLE) of a job that can be done again.

    Raises CliError: NOT_FOUND when there is no such job or a part of it is gone, CONFLICT when it did not succeed or its base
    model has changed.
    """
    found = job.find(database, number)
    if found["state"] != "succeeded":
        raise CliError(
            CONFLICT, f"job {number} is {found['state']}: only a job that succeeded can be compared with its result",
            f"artctl job {number}",
        )  # fmt: skip
    rows = database.rows(read.REPLAYABLE, id=number, limit=1)
    if not rows:
        raise CliError(
            FAILED, f"job {number} succeeded but has no checkpoint: the database is damaged", "artctl checkpoints"
        )
    _require(database, data, rows[0])
    _check_base(rows[0])
    return rows[0]


def _require(database: read.Database, data: Path, row: Row) -> None:
    """Raise CliError(NOT_FOUND) when a part is gone; the text names it, and jobs that are still complete."""
    if missing := list(_list_missing(data, row)):
        others = [
            r["id"] for r in database.rows(read.REPLAYABLE, id=0, limit=_LOOKED_AT) if not any(_list_missing(data, r))
        ][:_NAMED]
        instead = f"can be replayed: {', '.join(map(str, others))}" if others else "no job can be replayed any more"
        then = f"artd replay-job {others[0]}" if others else "set keep_checkpoints higher in the next run's spec"
        raise CliError(NOT_FOUND, f"job {row['id']} cannot be replayed: {'; '.join(missing)} ({instead})", then)


def _list_missing(data: Path, row: Row) -> Iterator[str]:
    """Yield, in words, each input or result of a job that is gone."""
    yield from _list_missing_checkpoint(data, "its checkpoint", row["run"], row["step"], row["state"], row["dir"])
    if row["kind"] == "init":
        return
    yield from _list_missing_checkpoint(
        data, "its parent", row["run"], row["parent_step"], row["parent_state"], row["parent_dir"]
    )
    if row["payload"] == "expired":
        yield "its batch's tensors have expired (retention.batches_days)"
    for column, what in _BLOBS:
        if row[column] and not (path := _blob(data, row[column])).is_file():
            yield f"{what} ({path}) is gone"


def _list_missing_checkpoint(data: Path, what: str, run: str, step: int, state: str, folder: str) -> Iterator[str]:
    if state == "retired":
        yield f"{what} {run}@{step} was deleted (keep_checkpoints)"
    elif not (data / folder / MANIFEST_FILE).is_file():
        yield f"{what} {run}@{step} is not in {data / folder} any more"


def _check_base(row: Row) -> None:
    try:
        check_pinned(row["spec"]["model"], msgspec.json.decode(row["base_manifest"], type=BaseModel))
    except Conflict as error:
        raise CliError(CONFLICT, f"job {row['id']} cannot be replayed: {error.message}") from None


def _blob(data: Path, sha: str) -> Path:
    return Path(DataDir(data, data).blob(sha))


def request(database: read.Database, data: Path, row: Row, target: Path) -> ReplayRequest:
    """Return what the trainer must do. `target`: folder of the result, which does not exist yet.

    Raises CliError(FAILED) for a run spec of another version.
    """
    instance = {entry["key"]: entry["value"] for entry in database.rows(read.META)}.get("instance", "")
    paths = {column: str(_blob(data, row[column])) if row[column] else "" for column, _ in _BLOBS}
    try:
        spec = msgspec.convert(row["spec"], RunSpec)
        learning = msgspec.json.decode(row["learning"], type=Learning) if row["learning"] else None
    except msgspec.DecodeError as error:
        raise CliError(
            FAILED, f"the spec of run {row['run']} cannot be read: {error}", "use the artd that made it"
        ) from None
    order = Run(
        job=row["id"], fence=row["fence"], kind=row["kind"], step=row["step"], epoch=row["epoch"], lineage=row["lineage"],
        dir=str(target), instance=instance, parent=_reference(data, row, "parent_") if row["parent_sha"] else None,
        batch=paths["tensors"], manifest=paths["manifest"], batch_sha=row["manifest"] or "", replay=paths["replay"],
        replay_manifest=paths["replay_manifest"], learning=learning,
    )  # fmt: skip
    code = committed_code(data, row)
    config = TrainerConfig(
        run=row["run"], spec=spec, base_digest=row["base_digest"], loss=code.loss, family=code.family
    )
    return ReplayRequest(config=config, run=order, committed=_reference(data, row, ""))


def _reference(data: Path, row: Row, prefix: str) -> CheckpointRef:
    fields = {name: row[prefix + name] for name in ("step", "epoch", "lineage", "sha")}
    return CheckpointRef(run=row["run"], dir=str(data / row[f"{prefix}dir"]), **fields)
