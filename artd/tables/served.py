"""Writes of the table `serving`: what an engine process has loaded. Callers decide; each function writes in their
transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from artd.store.store import move


def insert_served(c: sqlite3.Connection, now: int, engine: str, spawn: int, push: sqlite3.Row, name: str) -> None:
    """Insert what an engine's process serves: the checkpoint of a push, or one that a rollback left, which drains."""
    c.execute(
        "INSERT INTO serving (engine, spawn, run_id, checkpoint_id, name, state, created) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (engine, spawn, push["run_id"], push["checkpoint_id"], name, "draining" if push["abandoned"] else "live", now),
    )


def drain_abandoned(c: sqlite3.Connection, run: int) -> None:
    """Drain what a rollback left: no new request enters it."""
    c.execute(
        "UPDATE serving SET state = 'draining' WHERE run_id = ? AND state = 'live' AND checkpoint_id IN"
        " (SELECT id FROM checkpoint WHERE run_id = ? AND abandoned = 1)",
        (run, run),
    )


def mark_gone(c: sqlite3.Connection, serving: int) -> None:
    move(c, "serving", serving, "gone")


def delete_served(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM serving WHERE id = ?", ids)
