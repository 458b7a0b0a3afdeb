"""Writes of the table `trajectory_group` and of `group_count`, which its triggers keep. Callers decide; each function writes
in their transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from artd.store.store import move


def insert_group(c: sqlite3.Connection, now: int, run: int, name: str, split: str, deadline: int) -> int:
    """Insert an open group; returns its id."""
    number = c.execute(
        "INSERT INTO trajectory_group (run_id, name, split, state, deadline, created) VALUES (?, ?, ?, 'open', ?, ?)",
        (run, name, split, deadline, now),
    ).lastrowid
    assert number is not None
    return number


def resize_groups(c: sqlite3.Connection, sizes: Iterable[tuple[int, int]]) -> None:
    """Set the sizes of groups. `sizes` lists (size, group)."""
    c.executemany("UPDATE trajectory_group SET size = ? WHERE id = ?", sizes)


def set_deadline(c: sqlite3.Connection, group: int, deadline: int) -> None:
    c.execute("UPDATE trajectory_group SET deadline = ? WHERE id = ?", (deadline, group))


def mark_sealed(c: sqlite3.Connection, group: int) -> None:
    move(c, "trajectory_group", group, "sealed", start="open")


def mark_packed(c: sqlite3.Connection, group: int) -> None:
    move(c, "trajectory_group", group, "packed", start="sealed")


def mark_discarded(c: sqlite3.Connection, group: int, reason: str, start: str | None = None) -> None:
    """Discard a group. It must be in the state `start`; None allows every state that may be discarded."""
    move(c, "trajectory_group", group, "discarded", start=start, reason=reason)


def mark_groups_trained(c: sqlite3.Connection, batch: int) -> None:
    c.execute(
        "UPDATE trajectory_group SET state = 'trained' WHERE state = 'packed' AND id IN"
        " (SELECT group_id FROM trajectory WHERE batch_id = ?)",
        (batch,),
    )


def release_groups(c: sqlite3.Connection, batch: int, *, over: bool, reason: str) -> None:
    """Take the groups of a batch out of it: they wait again, or (over) are discarded."""
    c.execute(
        "UPDATE trajectory_group SET state = ?, reason = ? WHERE state = 'packed' AND id IN"
        " (SELECT group_id FROM trajectory WHERE batch_id = ?)",
        ("discarded" if over else "sealed", reason, batch),
    )


def mark_told(c: sqlite3.Connection, run: int) -> None:
    """Mark all groups that are not open: the metrics of a step count them."""
    c.execute(
        "UPDATE trajectory_group SET told = 1"
        " WHERE run_id = ? AND told = 0 AND state IN ('sealed', 'packed', 'trained', 'discarded')",
        (run,),
    )


def delete_groups(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM trajectory_group WHERE id = ?", ids)


def delete_counts(c: sqlite3.Connection, run: int) -> None:
    c.execute("DELETE FROM group_count WHERE run_id = ?", (run,))
