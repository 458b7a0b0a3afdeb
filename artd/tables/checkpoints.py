"""Writes of the tables `checkpoint` and `metric`. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from artd.store.store import move
from artd_schema.data.manifest import CheckpointManifest


def insert_checkpoint(
    c: sqlite3.Connection, now: int, job: sqlite3.Row, lineage: int, manifest: CheckpointManifest, sha: str, folder: str
) -> int | None:
    """Insert the committed result of a job and return its id. `sha` is that of the manifest; `folder` is relative to
    the data folder."""
    size = sum(entry.bytes for entry in manifest.files)
    return c.execute(
        "INSERT INTO checkpoint (run_id, step, epoch, lineage, parent_id, job_id, sha, dir, bytes, state, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'committed', ?)",
        (
            job["run_id"],
            manifest.step,
            manifest.epoch,
            lineage,
            job["parent_id"],
            job["id"],
            sha,
            folder,
            size,
            now,
        ),
    ).lastrowid


def retire_checkpoint(c: sqlite3.Connection, checkpoint: int) -> None:
    """Mark a checkpoint whose files are about to be deleted."""
    move(c, "checkpoint", checkpoint, "retired", start="committed")


def leave_checkpoints(c: sqlite3.Connection, run: int, step: int) -> int:
    """Take what comes after `step` off the chain; returns how many that are."""
    return c.execute(
        "UPDATE checkpoint SET abandoned = 1 WHERE run_id = ? AND step > ? AND abandoned = 0", (run, step)
    ).rowcount


def delete_checkpoints(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    """Delete rows that no job names any more."""
    c.executemany("UPDATE checkpoint SET parent_id = NULL WHERE parent_id = ?", ids)
    c.executemany("DELETE FROM checkpoint WHERE id = ?", ids)


def insert_metrics(c: sqlite3.Connection, run: int, lineage: int, step: int, metrics: Mapping[str, float]) -> None:
    c.executemany(
        "INSERT INTO metric (run_id, lineage, step, name, value) VALUES (?, ?, ?, ?, ?)",
        [(run, lineage, step, name, value) for name, value in metrics.items()],
    )


def delete_metrics(c: sqlite3.Connection, run: int) -> None:
    c.execute("DELETE FROM metric WHERE run_id = ?", (run,))
