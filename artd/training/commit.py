"""Turns a trainer's result into a step: verifies and publishes the staged files, then commits the checkpoint in one
transaction.

Owns the folder `checkpoints`. The daemon does not trust the worker: it hashes and fsyncs every file itself. A result
that is reported now and one that is found at boot go through the same functions with the same guards.
"""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import UNSET

from artd.core.fleet import engines_of
from artd.datadir.layout import DataDir
from artd.store import fs
from artd.store.blobs import hash_file
from artd.store.store import emit
from artd.tables.batches import mark_batch_trained
from artd.tables.checkpoints import insert_checkpoint, insert_metrics
from artd.tables.groups import mark_groups_trained
from artd.tables.jobs import succeed_job
from artd.tables.pushes import prepare_push
from artd.tables.runs import advance_run
from artd.tables.trajectories import mark_trained
from artd_schema.codec import UNREADABLE, digest
from artd_schema.data.manifest import MANIFEST_FILE, CheckpointManifest
from artd_schema.run.spec import Learning, RunSpec
from artd_schema.wire.worker import CheckpointRef

from .sampled import since_last_step

_HASHERS = 8
"""Threads that hash files in parallel: the adapter and the optimizer moments of a large model take gigabytes."""


class BadResult(Exception):
    """A staged result that cannot be committed; the text says which file or field."""


class Stale(Exception):
    """The result comes too late: its fence is older, or the job was cancelled, or its run or its parent has changed."""


def verify(folder: Path) -> tuple[str, CheckpointManifest]:
    """Hash every file of a staged or published folder and compare with its manifest. Returns the manifest's digest and
    the manifest. Raises BadResult."""
    try:
        raw = (folder / MANIFEST_FILE).read_bytes()
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
    except (OSError, *UNREADABLE) as error:
        raise BadResult(f"{folder / MANIFEST_FILE} cannot be read: {error}") from None
    listed = {entry.name for entry in manifest.files} | {MANIFEST_FILE}
    if extra := {path.name for path in folder.iterdir()} ^ listed:
        raise BadResult(f"{folder}: {', '.join(sorted(extra))} is not both in the folder and in its manifest")
    if odd := [entry.name for entry in manifest.files if not (folder / entry.name).is_file()]:
        raise BadResult(f"{folder / odd[0]} is not a regular file")
    with ThreadPoolExecutor(_HASHERS) as pool:
        found = list(pool.map(lambda entry: hash_file(folder / entry.name), manifest.files))
    for entry, each in zip(manifest.files, found, strict=True):
        if each != (entry.sha256, entry.bytes):
            raise BadResult(f"{folder / entry.name} does not have the sha256 and size that its manifest says")
    return digest(raw), manifest


def publish(data: DataDir, staged: Path, manifest: CheckpointManifest) -> str:
    """Fsync the staged folder and rename it to its final name. Returns that name, relative to the data folder.

    If the folder already has its final name, an earlier daemon renamed it and may have died before the rename was
    durable: only the parent folder is fsynced again.
    """
    relative = data.checkpoint(manifest.run, manifest.lineage, manifest.step, manifest.job, manifest.fence)
    target = data.root / relative
    if staged != target:
        fs.fsync_tree(staged)
        fs.remove_tree(target)
        fs.publish(staged, target)
    else:
        fs.make_dir(target.parent)
        fs.fsync_dir(target.parent)
    return relative


def commit(
    c: sqlite3.Connection, now: int, data: DataDir, relative: str, sha: str, manifest: CheckpointManifest,
    seconds: dict[str, float],
) -> CheckpointRef:  # fmt: skip
    """Commit the result of a job as the run's next step.

    Inserts the checkpoint's row, advances the run, marks batch and trajectories as trained and the job as succeeded,
    prepares the pushes and emits the event. Raises Stale, BadResult.
    """
    job = c.execute("SELECT * FROM job WHERE id = ?", (manifest.job,)).fetchone()
    run = c.execute("SELECT * FROM run WHERE id = ?", (job["run_id"],)).fetchone() if job else None
    if job is None or run is None or (job["state"], job["fence"], job["cancel"]) != ("running", manifest.fence, 0):
        raise Stale(f"job {manifest.job} fence {manifest.fence} is not the running one")
    if run["state"] == "finished":
        raise Stale(f"run {run['name']} is finished")
    _check(c, run, job, manifest)
    checkpoint = insert_checkpoint(c, now, job, run["lineage"], manifest, sha, relative)
    if not advance_run(c, run["id"], manifest.step, checkpoint, job["parent_id"]):
        raise Stale(f"run {run['name']} is not at step {manifest.step - 1} from which job {job['id']} continues")
    metrics = manifest.metrics
    if job["batch_id"] is not None:
        mark_batch_trained(c, job["batch_id"])
        mark_groups_trained(c, job["batch_id"])
        mark_trained(c, job["batch_id"])
        # Metrics of the batch, of all samples since the last step, and of the trainer; a later one replaces an earlier one.
        metrics = msgspec.json.decode(job["metrics"]) | since_last_step(c, run["id"]) | metrics
    spent = msgspec.json.decode(job["seconds"]) | seconds
    succeed_job(c, now, job, msgspec.json.encode(metrics), msgspec.json.encode(spent))
    insert_metrics(c, run["id"], run["lineage"], manifest.step, metrics)
    spec = msgspec.json.decode(run["spec"], type=RunSpec)
    for engine in engines_of(run["id"], spec):
        prepare_push(c, now, run["id"], engine, int(checkpoint or 0), spec.rollout_weights_mode)
    emit(
        c,
        now,
        run["name"],
        "step.committed",
        manifest.step,
        sha=sha,
        job=job["id"],
        metrics=metrics,
        seconds=spent,
    )
    return CheckpointRef(run=run["name"], step=manifest.step, epoch=manifest.epoch, lineage=run["lineage"], sha=sha,
                         dir=str(data.root / relative))  # fmt: skip


def _check(c: sqlite3.Connection, run: sqlite3.Row, job: sqlite3.Row, manifest: CheckpointManifest) -> None:
    parent = c.execute("SELECT sha FROM checkpoint WHERE id = ?", (job["parent_id"],)).fetchone()
    batch = c.execute("SELECT manifest FROM batch WHERE id = ?", (job["batch_id"],)).fetchone()
    expected = {
        "run": run["name"],
        "step": job["step"],
        "epoch": job["epoch"],
        "lineage": run["lineage"],
        "parent": parent["sha"] if parent else "",
        "batch": batch["manifest"] if batch else "",
        "base_digest": run["base_digest"],
        "learning": msgspec.json.decode(job["learning"], type=Learning) if job["learning"] else UNSET,
    }
    for name, value in expected.items():
        if (found := getattr(manifest, name)) != value:
            raise BadResult(f"job {job['id']}: the checkpoint's {name} is {found!r}, the job's is {value!r}")
