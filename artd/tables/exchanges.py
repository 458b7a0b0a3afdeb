"""Writes of the table `exchange`, the ledger. Callers decide; each function writes in their transaction.

A row of a rollout has a delivery: `pending`, `delivered` or `lost`, and `superseded` for ever once it may not be trained (docs/adr/0006).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

SPAWN_BITS = 40
"""The bits of `exchange.place` below the gateway's spawn."""
UNDELIVERED = "(delivery = 'lost' OR (delivery = 'pending' AND place < ?))"
"""The SQL condition for a reply that its client has not: the gateway saw the client go, or died before it said more. Its value: the first
place of the gateway that lives."""


class Entry(NamedTuple):
    """A row to insert. place, request, delivery: of a rollout's, else 0, "" and ""."""

    run: int
    response_id: str
    choice: int
    model: str
    split: str
    turn: bytes | None
    blob: str | None
    created: int
    rollout: int | None = None
    place: int = 0
    request: str = ""
    delivery: str = ""


def first_place(place: int) -> int:
    """Return the first place that the gateway of this one gave out."""
    return place >> SPAWN_BITS << SPAWN_BITS


def insert_exchanges(c: sqlite3.Connection, rows: Sequence[Entry]) -> None:
    """Insert the choices of a response; one that is there already stays."""
    c.executemany(
        "INSERT INTO exchange (run_id, response_id, choice, model, split, turn, blob, created, rollout_id, place, request, delivery)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id, response_id, choice) DO NOTHING",
        rows,
    )


def supersede_undelivered(c: sqlite3.Connection, rollout: int, request: str, place: int) -> None:
    """Supersede the undelivered answers to a request that has come again, at `place`."""
    c.execute(
        f"UPDATE exchange SET delivery = 'superseded' WHERE rollout_id = ? AND request = ? AND {UNDELIVERED}"
        " AND trajectory_id IS NULL",
        (rollout, request, first_place(place)),
    )


def supersede_lost(c: sqlite3.Connection, rollout: int) -> None:
    """Supersede what was lost of a rollout that is submitted."""
    c.execute(
        "UPDATE exchange SET delivery = 'superseded' WHERE rollout_id = ? AND delivery = 'lost' AND trajectory_id IS NULL",
        (rollout,),
    )


def resume_delivery(c: sqlite3.Connection, run: int, response_id: str) -> None:
    """Note that a reply that was lost is sent again: its client may submit it before the mark of this delivery comes."""
    c.execute(
        "UPDATE exchange SET delivery = 'pending' WHERE run_id = ? AND response_id = ? AND delivery = 'lost'",
        (run, response_id),
    )


def mark_delivery(c: sqlite3.Connection, run: int, response_id: str, delivery: str) -> None:
    """Set what became of a reply of a rollout. What was delivered or superseded once stays that."""
    c.execute(
        "UPDATE exchange SET delivery = ? WHERE run_id = ? AND response_id = ? AND delivery IN ('pending', 'lost')",
        (delivery, run, response_id),
    )


def use_exchanges(c: sqlite3.Connection, used: Sequence[tuple[int, int]]) -> None:
    """Give exchanges to trajectories and forget their turns. `used` lists (trajectory, exchange)."""
    c.executemany("UPDATE exchange SET trajectory_id = ?, turn = NULL, blob = NULL WHERE id = ?", used)


def delete_exchanges(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM exchange WHERE id = ?", ids)
