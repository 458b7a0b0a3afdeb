"""Runs that are being deleted: `artd check` looks past them, since their rows go a few at a time.

Owner of: temporary views of the tables of a run. Invariants: a view stands before the table of its name for every query of
this connection; there are none while no run was deleted.
"""

from __future__ import annotations

import sqlite3

from artd.store.selects import NOT_DELETED

KEPT = f"SELECT id FROM main.run WHERE {NOT_DELETED}"
VIEWS = {
    "run": NOT_DELETED,
    **dict.fromkeys(
        (
            "trajectory",
            "trajectory_group",
            "exchange",
            "batch",
            "job",
            "checkpoint",
            "push",
            "serving",
            "metric",
            "group_count",
        ),
        f"run_id IN ({KEPT})",
    ),
    "trajectory_data": f"trajectory_id IN (SELECT id FROM main.trajectory WHERE run_id IN ({KEPT}))",
    "attempt": f"job_id IN (SELECT id FROM main.job WHERE run_id IN ({KEPT}))",
    # Of a run by name: those up to its deletion, for another run may have the name by now.
    "event": "NOT EXISTS (SELECT 1 FROM main.run r JOIN main.meta m ON m.key = 'deleting ' || r.id"
    " WHERE r.name = '.deleting.' || r.id || '.' || main.event.run AND main.event.id <= CAST(m.value AS INTEGER))",
}


def hide_deleted(c: sqlite3.Connection) -> None:
    """Let the queries of `c` see no row of a deleted run. Errors: sqlite3.DatabaseError."""
    if c.execute(f"SELECT 1 FROM main.run WHERE NOT ({NOT_DELETED}) LIMIT 1").fetchone() is None:
        return
    for table, condition in VIEWS.items():
        c.execute(f"CREATE TEMP VIEW IF NOT EXISTS {table} AS SELECT * FROM main.{table} WHERE {condition}")
