"""Writes of the table `exchange`, the ledger. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any


def insert_exchanges(c: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert the choices of a response; one that is there already stays."""
    c.executemany(
        "INSERT INTO exchange (run_id, response_id, choice, model, split, turn, blob, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id, response_id, choice) DO NOTHING",
        rows,
    )


def use_exchanges(c: sqlite3.Connection, used: Sequence[tuple[int, int]]) -> None:
    """Give exchanges to trajectories and forget their turns. `used` lists (trajectory, exchange)."""
    c.executemany("UPDATE exchange SET trajectory_id = ?, turn = NULL, blob = NULL WHERE id = ?", used)


def delete_exchanges(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM exchange WHERE id = ?", ids)
