"""Requests that count once although a client repeats them after a reconnect.

Owns the table `request`. An id is stored in the transaction of its change; what was refused is not stored.
"""

from __future__ import annotations

import sqlite3

KEPT = 10_000
"""Requests that are remembered. A client repeats one within its time-out, so this is far more than can be under way."""


def first_time(c: sqlite3.Connection, now: int, request: str) -> bool:
    """Return whether this request has not been done yet, and note it. A request without an id ("") always counts as
    new."""
    if not request:
        return True
    stored = c.execute("INSERT INTO request (name, at) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (request, now))
    if stored.rowcount != 1:
        return False
    c.execute("DELETE FROM request WHERE id <= (SELECT max(id) FROM request) - ?", (KEPT,))
    return True
