"""Hides runs that the daemon is deleting from `artd check`, because their rows go a few at a time.

Owns temporary views of the tables of a run. Every query of the connection sees the view in place of the table of the
same name. The views exist only if a run is being deleted.
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
    # An event names its run. Hide the events up to the deletion only, for another run may have the name by now.
    "event": "NOT EXISTS (SELECT 1 FROM main.run r JOIN main.meta m ON m.key = 'deleting ' || r.id"
    " WHERE r.name = '.deleting.' || r.id || '.' || main.event.run AND main.event.id <= CAST(m.value AS INTEGER))",
}


def hide_deleted(c: sqlite3.Connection) -> None:
    """Hide every row of a deleted run from the queries of `c`. Raises sqlite3.DatabaseError."""
    if c.execute(f"SELECT 1 FROM main.run WHERE NOT ({NOT_DELETED}) LIMIT 1").fetchone() is None:
        return
    for table, condition in VIEWS.items():
        c.execute(f"CREATE TEMP VIEW IF NOT EXISTS {table} AS SELECT * FROM main.{table} WHERE {condition}")
