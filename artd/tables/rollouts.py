"""Writes of the table `rollout`. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from artd.store.store import move


def touch_rollout(c: sqlite3.Connection, now: int, run: int, name: str) -> int:
    """Note that a rollout has a response; insert it with its first one. Returns its id."""
    (number,) = c.execute(
        "INSERT INTO rollout (run_id, name, state, created, touched) VALUES (?, ?, 'open', ?, ?)"
        " ON CONFLICT (run_id, name) DO UPDATE SET touched = excluded.touched RETURNING id",
        (run, name, now, now),
    ).fetchone()
    return int(number)


def mark_submitted(c: sqlite3.Connection, rollout: int, trajectory: int) -> None:
    move(c, "rollout", rollout, "submitted", start="open", trajectory_id=trajectory)


def expire_rollouts(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    """Expire those of these rollouts that are open."""
    c.executemany("UPDATE rollout SET state = 'expired' WHERE id = ? AND state = 'open'", ids)


def delete_rollouts(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM rollout WHERE id = ?", ids)
