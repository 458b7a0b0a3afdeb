"""Applies an order to many groups of a run, a slice in each transaction, so that nobody waits long for the writer.

After a restart `Ingest.run` continues what was begun, because the rows show it: a deadline that has passed, `flush_to`,
a finished run with waiting groups.
"""

from __future__ import annotations

import sqlite3

from artd.store.store import emit
from artd.tables.groups import mark_discarded
from artd.tables.jobs import FINISHED
from artd.tables.runs import note_flushed
from artd.tables.trajectories import discard_queued

from .insert import seal_group

GROUPS = 100
"""The most groups of one transaction."""
DUE = f"SELECT id FROM trajectory_group WHERE state = 'open' AND deadline <= ? ORDER BY deadline LIMIT {GROUPS}"
OPEN = f"SELECT id FROM trajectory_group WHERE run_id = ? AND state = 'open' AND id <= ? ORDER BY id LIMIT {GROUPS}"
WAITING = (
    "SELECT id, name, state, size FROM trajectory_group WHERE run_id = ? AND state = ? AND split = 'train'"
    f" ORDER BY id LIMIT {GROUPS}"
)
UNDER_WAY = "SELECT id, state FROM run WHERE flush_to > 0 OR state = 'finished'"


def seal_due(c: sqlite3.Connection, now: int) -> None:
    """Seal some of the groups whose deadline has passed."""
    for row in c.execute(DUE, (now,)).fetchall():
        seal_group(c, now, row["id"])


def flush(c: sqlite3.Connection, now: int, run: int) -> bool:
    """Seal some of the open groups that a flush covers. Returns whether there may be more. After the last one the
    packer may pack a partial batch."""
    row = c.execute("SELECT name, flush_to FROM run WHERE id = ?", (run,)).fetchone()
    if row is None or not row["flush_to"]:
        return False
    found = c.execute(OPEN, (run, row["flush_to"])).fetchall()
    for group in found:
        seal_group(c, now, group["id"])
    if len(found) == GROUPS:
        return True
    note_flushed(c, run)
    emit(c, now, row["name"], "run.flushed")
    return False


def discard_waiting(c: sqlite3.Connection, now: int, run: int) -> bool:
    """Discard some groups that a finished run left waiting, with their trajectories, because nothing will train them.
    Returns whether there may be more."""
    row = c.execute("SELECT name FROM run WHERE id = ? AND state = 'finished'", (run,)).fetchone()
    if row is None:
        return False
    found = [group for state in ("sealed", "open") for group in c.execute(WAITING, (run, state)).fetchall()][:GROUPS]
    for group in found:
        mark_discarded(c, group["id"], FINISHED, start=group["state"])
        discard_queued(c, group["id"], FINISHED)
        emit(c, now, row["name"], "group.discarded", group["name"], size=group["size"], reason=FINISHED)
    return len(found) == GROUPS
