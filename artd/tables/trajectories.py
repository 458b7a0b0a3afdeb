"""Writes of the tables `trajectory` and `trajectory_data`. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from artd.store.store import move

INSERT = (
    "INSERT INTO trajectory (id, run_id, group_id, key, content, digest, reward, split, state, blob, tokens, epoch_min,"
    " epoch_max, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?, ?, ?, ?, ?)"
)
INSERT_DATA = "INSERT INTO trajectory_data (trajectory_id, metrics, metadata, body) VALUES (?, ?, ?, ?)"


def insert_trajectories(
    c: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], data: Sequence[tuple[Any, ...]]
) -> None:
    """Insert queued trajectories. `rows` and `data` have their columns in the order of `INSERT` and `INSERT_DATA`."""
    c.executemany(INSERT, rows)
    c.executemany(INSERT_DATA, data)


def pack_trajectory(c: sqlite3.Connection, trajectory: int, batch: int | None, reason: str) -> None:
    move(c, "trajectory", trajectory, "packed", start="queued", batch_id=batch, reason=reason)


def drop_trajectory(c: sqlite3.Connection, trajectory: int, reason: str) -> None:
    """Discard a queued one."""
    move(c, "trajectory", trajectory, "discarded", start="queued", reason=reason)


def note_drops(c: sqlite3.Connection, reasons: Iterable[tuple[str, int]]) -> None:
    """Note why trajectories were discarded. `reasons` lists (why, trajectory)."""
    c.executemany("UPDATE trajectory SET reason = ? WHERE id = ? AND state = 'discarded'", reasons)


def mark_trained(c: sqlite3.Connection, batch: int) -> None:
    c.execute("UPDATE trajectory SET state = 'trained' WHERE batch_id = ? AND state = 'packed'", (batch,))


def release_trajectories(c: sqlite3.Connection, batch: int, *, over: bool, reason: str) -> None:
    """Take the trajectories of a batch out of it: they wait again, or (over) are discarded and keep the batch's number."""
    c.execute(
        "UPDATE trajectory SET state = ?, reason = ?, batch_id = iif(?, batch_id, NULL)"
        " WHERE batch_id = ? AND state = 'packed'",
        ("discarded" if over else "queued", reason, over, batch),
    )


def discard_queued(c: sqlite3.Connection, group: int, reason: str) -> None:
    """Discard what waits of a group."""
    c.execute(
        "UPDATE trajectory SET state = 'discarded', reason = ? WHERE group_id = ? AND state = 'queued'", (reason, group)
    )


def discard_all(c: sqlite3.Connection, group: int, reason: str) -> None:
    """Discard the trajectories of a group that was open until now."""
    c.execute("UPDATE trajectory SET state = 'discarded', reason = ? WHERE group_id = ?", (reason, group))


def expire_trajectories(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    """Forget what they hold; the rows stay."""
    c.executemany("UPDATE trajectory SET payload = 'expired', blob = NULL WHERE id = ?", ids)
    c.executemany("UPDATE trajectory_data SET body = NULL, metadata = NULL WHERE trajectory_id = ?", ids)


def delete_trajectories(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM trajectory_data WHERE trajectory_id = ?", ids)
    c.executemany("DELETE FROM trajectory WHERE id = ?", ids)
