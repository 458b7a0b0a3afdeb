"""Rows for clients: one query per table, newest first, values as JSON knows them.

Owner of: nothing. Invariants: read-only connections only; no payloads, no blobs.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from artd_schema import client_api as api

from .errors import NotFound
from .store.store import Store

JSON_COLUMNS = frozenset({"metrics", "seconds", "data", "spec"})
QUERIES = {
    "runs": "SELECT id, name, state, reason, step, lineage, created, name AS run FROM run",
    "jobs": "SELECT j.id, r.name AS run, j.kind, j.step, j.state, j.fence, j.attempts, j.deaths, j.error, j.metrics, j.seconds,"
    " j.created, j.started, j.ended FROM job j JOIN run r ON r.id = j.run_id",
    "trajectories": "SELECT t.id, r.name AS run, g.name AS grp, t.key, t.reward, t.split, t.state, t.reason, t.tokens,"
    " t.epoch_min, t.epoch_max, t.batch_id, t.metrics, t.created FROM trajectory t JOIN run r ON r.id = t.run_id"
    " JOIN trajectory_group g ON g.id = t.group_id",
    "groups": "SELECT g.id, r.name AS run, g.name, g.split, g.state, g.reason, g.size, g.created FROM trajectory_group g"
    " JOIN run r ON r.id = g.run_id",
    "batches": "SELECT b.id, r.name AS run, b.step, b.state, b.trajectories, b.tokens, b.fill, b.covered, b.payload, b.manifest,"
    " b.replay,"
    " b.created FROM batch b JOIN run r ON r.id = b.run_id",
    "checkpoints": "SELECT k.id, r.name AS run, k.step, k.epoch, k.lineage, k.abandoned, k.sha, k.dir, k.bytes, k.state, k.job_id, k.created"
    " FROM checkpoint k JOIN run r ON r.id = k.run_id",
    "pushes": "SELECT p.id, r.name AS run, p.engine, k.step, p.mode, p.source, p.transfer, p.state, p.fence, p.attempts, p.max_abs,"
    " p.mean_abs, p.seconds, p.error, p.created, p.started, p.ended FROM push p JOIN run r ON r.id = p.run_id"
    " JOIN checkpoint k ON k.id = p.checkpoint_id",
    "workers": "SELECT rowid AS id, '' AS run, name, kind, state, pid, spawn, restarts, error, since FROM"
    " (SELECT row_number() OVER (ORDER BY name) AS rowid, * FROM process)",
    "events": "SELECT id, at, run, kind, ref, data FROM event",
}


async def read_rows(store: Store, op: api.List) -> list[dict[str, Any]]:
    """Rows of `op.what`, newest first. Errors: NotFound for an unknown table."""
    if op.what not in QUERIES:
        raise NotFound(f"nothing is listed as {op.what!r}; {', '.join(QUERIES)} are", field="what")
    conditions, parameters = ["id > ?"], [op.after]
    values: list[Any] = [*parameters]
    if op.run and op.what != "workers":
        conditions.append("run = ?")
        values.append(op.run)
    if op.states and op.what != "events":
        conditions.append(f"state IN ({','.join('?' * len(op.states))})")
        values.extend(op.states)
    sql = f"SELECT * FROM ({QUERIES[op.what]}) WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT ?"
    return [_plain(row) for row in await store.read(sql, [*values, _bounded(op.limit)])]


async def read_events(store: Store, op: api.Events) -> list[dict[str, Any]]:
    """Events after `op.after`, oldest first."""
    condition = "AND run = ?" if op.run else ""
    values: list[Any] = [op.after, *([op.run] if op.run else []), _bounded(op.limit)]
    rows = await store.read(f"{QUERIES['events']} WHERE id > ? {condition} ORDER BY id LIMIT ?", values)
    return [_plain(row) for row in rows]


def _bounded(limit: int) -> int:
    return max(0, min(limit, 10_000))


def _plain(row: sqlite3.Row) -> dict[str, Any]:
    renamed = {"grp": "group"}
    return {
        renamed.get(key, key): msgspec.json.decode(row[key])
        if key in JSON_COLUMNS and row[key] is not None
        else row[key]
        for key in row.keys()  # noqa: SIM118 - sqlite3.Row iterates over values
    }
