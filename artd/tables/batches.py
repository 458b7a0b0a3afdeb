"""Writes of the table `batch`. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from artd.store.store import move


def insert_batch(c: sqlite3.Connection, columns: Mapping[str, Any]) -> int | None:
    """Insert a packed batch; returns its id."""
    row = {**columns, "state": "packed"}
    return c.execute(f"INSERT INTO batch ({', '.join(row)}) VALUES (:{', :'.join(row)})", row).lastrowid


def mark_batch_trained(c: sqlite3.Connection, batch: int) -> None:
    move(c, "batch", batch, "trained", start="packed")


def abandon_batch(c: sqlite3.Connection, batch: int) -> None:
    move(c, "batch", batch, "abandoned", start="packed")


def expire_batches(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    """Forget what they hold; the rows stay."""
    c.executemany("UPDATE batch SET payload = 'expired', tensors = NULL, replay = NULL WHERE id = ?", ids)


def delete_batches(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM batch WHERE id = ?", ids)
