"""Carries out what an operator orders about a group. An order that comes again changes nothing."""

from __future__ import annotations

import sqlite3

from artd.errors import Conflict, NotFound
from artd.packing import failures
from artd.tables import pauses

DISCARDED = "an operator discarded it (artctl discard-group)"
FIND = """
SELECT g.id, g.run_id, g.state, (SELECT j.id FROM trajectory t JOIN job j ON j.batch_id = t.batch_id WHERE t.group_id = g.id
  AND t.state = 'packed' ORDER BY j.id DESC LIMIT 1) AS job
FROM trajectory_group g JOIN run r ON r.id = g.run_id WHERE r.name = ? AND g.name = ?"""


def discard_group(c: sqlite3.Connection, now: int, run: str, group: str) -> None:
    """Discard an open or sealed group with its trajectories, and lift the pause that it caused.

    Raises NotFound for an unknown group, and Conflict for one that is in a batch or was trained.
    """
    row = c.execute(FIND, (run, group)).fetchone()
    if row is None:
        raise NotFound(f"run {run!r} has no group {group!r}: artctl trajectories --run {run}", field="group")
    if row["state"] == "packed":
        raise Conflict(
            f"group {group!r} is in the batch of job {row['job']}: artctl discard {row['job']}", field="group"
        )
    if row["state"] == "trained":
        raise Conflict(f"group {group!r} is trained already; artctl rollback leaves the steps after one", field="group")
    if row["state"] in ("open", "sealed"):
        failures.discard(c, now, row["id"], DISCARDED)
    pauses.lift(c, now, row["run_id"], pauses.of_group(row["id"]))
    failures.take_note(c, run, group)
