"""A step becomes real: the staged files are verified and published, then one transaction makes the checkpoint.

Owner of: the folder `checkpoints`, checkpoint rows, a run's newest checkpoint and step. Invariants: the worker's word is not enough: the
daemon hashes and fsyncs every file itself; reported now or found at boot, a result goes through the same functions
with the same guards.
"""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from artd.datadir.layout import DataDir
from artd.store import fs
from artd.store.blobs import hash_file
from artd.store.store import emit, move
from artd_schema.codec import UNREADABLE, digest
from artd_schema.manifest import CheckpointManifest
from artd_schema.worker import CheckpointRef

from .sampled import since_last_step

MANIFEST = "manifest.json"
_HASHERS = 8
"""Files that are hashed beside each other: adapter and moments of a large model are gigabytes."""


class BadResult(Exception):
    """A staged result that cannot be committed; the text says which file or field."""


class Stale(Exception):
    """The job moved on: its fence is older, or it was cancelled, or its run or parent changed."""


def verify(folder: Path) -> tuple[str, CheckpointManifest]:
    """Hash every file of a staged or published folder against its manifest. Errors: BadResult."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
    except (OSError, *UNREADABLE) as error:
        raise BadResult(f"{folder / MANIFEST} cannot be read: {error}") from None
    listed = {entry.name for entry in manifest.files} | {MANIFEST}
    if extra := {path.name for path in folder.iterdir()} ^ listed:
        raise BadResult(f"{folder}: {', '.join(sorted(extra))} is not both in the folder and in its manifest")
    if odd := [entry.name for entry in manifest.files if not (folder / entry.name).is_file()]:
        raise BadResult(f"{folder / odd[0]} is no file")
    with ThreadPoolExecutor(_HASHERS) as pool:
        found = list(pool.map(lambda entry: hash_file(folder / entry.name), manifest.files))
    for entry, each in zip(manifest.files, found, strict=True):
        if each != (entry.sha256, entry.bytes):
            raise BadResult(f"{folder / entry.name} does not have the sha256 and size that its manifest says")
    return digest(raw), manifest


def publish(data: DataDir, staged: Path, manifest: CheckpointManifest) -> str:
    """fsync the staged folder and rename it to its final name; returns that name, relative to the data folder. One that has it
    already was renamed by a daemon that may have died before the name was durable."""
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
    """Checkpoint row, `run.step`, batch and trajectories trained, job succeeded, push prepared, event. Errors: Stale,
    BadResult."""
    job = c.execute("SELECT * FROM job WHERE id = ?", (manifest.job,)).fetchone()
    run = c.execute("SELECT * FROM run WHERE id = ?", (job["run_id"],)).fetchone() if job else None
    if job is None or run is None or (job["state"], job["fence"], job["cancel"]) != ("running", manifest.fence, 0):
        raise Stale(f"job {manifest.job} fence {manifest.fence} is not the running one")
    if run["state"] == "finished":
        raise Stale(f"run {run['name']} is finished")
    _check(c, run, job, manifest)
    size = sum(entry.bytes for entry in manifest.files)
    checkpoint = c.execute(
        "INSERT INTO checkpoint (run_id, step, epoch, lineage, parent_id, job_id, sha, dir, bytes, state, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'committed', ?)",
        (
            run["id"],
            manifest.step,
            manifest.epoch,
            run["lineage"],
            job["parent_id"],
            job["id"],
            sha,
            relative,
            size,
            now,
        ),
    ).lastrowid
    changed = c.execute(
        "UPDATE run SET checkpoint_id = ?, step = ? WHERE id = ? AND checkpoint_id IS ? AND step = ?",
        (checkpoint, manifest.step, run["id"], job["parent_id"], manifest.step - 1),
    ).rowcount
    if changed != 1:
        raise Stale(f"run {run['name']} is not at step {manifest.step - 1} from which job {job['id']} goes on")
    metrics = manifest.metrics
    if job["batch_id"] is not None:
        _mark_trained(c, job["batch_id"])
        # Of the batch, of what else was sampled meanwhile, and the trainer's own.
        metrics = msgspec.json.decode(job["metrics"]) | since_last_step(c, run["id"]) | metrics
    spent = msgspec.json.decode(job["seconds"]) | seconds
    move(c, "job", job["id"], "succeeded", start="running", worker=None, ended=now, error="", metrics=msgspec.json.encode(metrics),
         seconds=msgspec.json.encode(spent))  # fmt: skip
    c.execute(
        "UPDATE attempt SET ended = ?, outcome = 'succeeded' WHERE job_id = ? AND fence = ?",
        (now, job["id"], job["fence"]),
    )
    c.executemany(
        "INSERT INTO metric (run_id, lineage, step, name, value) VALUES (?, ?, ?, ?, ?)",
        [(run["id"], run["lineage"], manifest.step, name, value) for name, value in metrics.items()],
    )
    mode = msgspec.json.decode(run["spec"])["rollout_weights_mode"]
    prepare_push(c, now, run["id"], int(checkpoint or 0), mode)
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
    }
    for name, value in expected.items():
        if (found := getattr(manifest, name)) != value:
            raise BadResult(f"job {job['id']}: the checkpoint's {name} is {found!r}, the job's is {value!r}")


def _mark_trained(c: sqlite3.Connection, batch: int) -> None:
    move(c, "batch", batch, "trained", start="packed")
    c.execute(
        "UPDATE trajectory_group SET state = 'trained' WHERE state = 'packed' AND id IN"
        " (SELECT group_id FROM trajectory WHERE batch_id = ?)",
        (batch,),
    )
    c.execute("UPDATE trajectory SET state = 'trained' WHERE batch_id = ? AND state = 'packed'", (batch,))


def prepare_push(c: sqlite3.Connection, now: int, run_id: int, checkpoint: int, mode: str) -> None:
    c.execute(
        "INSERT INTO push (run_id, engine, checkpoint_id, mode, state, created) VALUES (?, 'engine', ?, ?, 'prepared', ?)",
        (run_id, checkpoint, mode, now),
    )
