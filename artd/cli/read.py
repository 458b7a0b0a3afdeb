"""Reading the database from the command line: one read-only connection and every query that the verbs use
(the columns of the tables are in `artd.tables`).

Owner of: no state. Invariants: `mode=ro` and `query_only`; nothing here needs a daemon; the JSON columns come back
decoded.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from artd_schema.paths import DATABASE

from .. import tables
from ..store.readonly import open_readonly
from .outcome import FAILED, NOT_FOUND, NOT_RUNNING, CliError, near
from .probe import start_command

Row = dict[str, Any]

META = "SELECT key, value FROM meta"
RUNS = f"{tables.RUNS} ORDER BY r.state = 'finished', r.id DESC LIMIT :limit"
MODEL = """
SELECT vocab_size, routes FROM run WHERE name = :run"""
GROUP_COUNTS = """
SELECT g.split, g.state, count(*) AS groups, total(g.size) AS trajectories
FROM trajectory_group g JOIN run r ON r.id = g.run_id WHERE r.name = :run GROUP BY g.split, g.state"""
UNPACKED = """
SELECT count(*) AS dropped FROM (SELECT run_id, state, reason FROM trajectory ORDER BY id DESC LIMIT :limit) t
JOIN run r ON r.id = t.run_id WHERE r.name = :run AND t.state = 'discarded' AND t.reason LIKE '%more than row_length%'"""
JOB_COUNTS = """
SELECT j.state, count(*) AS count, total(j.state = 'queued' AND j.attempts > 0) AS retrying
FROM job j JOIN run r ON r.id = j.run_id WHERE :run = '' OR r.name = :run GROUP BY j.state"""
JOBS = f"""
SELECT * FROM ({tables.JOBS}) WHERE (:run = '' OR run = :run) AND (:state = '' OR state = :state) AND (:id = 0 OR id = :id)
ORDER BY id DESC LIMIT :limit"""
ATTEMPTS = """
SELECT fence, worker, spawn, outcome, error, evidence, started, ended FROM attempt WHERE job_id = :id ORDER BY fence"""
MEMBERS = """
SELECT t.id, g.name AS "group", t.key, t.reward, t.tokens, t.state FROM trajectory t JOIN trajectory_group g ON g.id = t.group_id
WHERE t.batch_id = :batch ORDER BY t.id"""
REPLAYABLE = """
SELECT j.id, j.kind, j.step, j.epoch, j.fence, r.name AS run, r.spec, r.base_digest, r.base_manifest,
  k.sha, k.dir, k.lineage, k.state, k.bytes,
  p.sha AS parent_sha, p.dir AS parent_dir, p.lineage AS parent_lineage, p.state AS parent_state, p.step AS parent_step,
  p.epoch AS parent_epoch, b.payload, b.tensors, b.manifest, b.replay, b.replay_manifest
FROM job j JOIN run r ON r.id = j.run_id JOIN checkpoint k ON k.job_id = j.id
  LEFT JOIN checkpoint p ON p.id = j.parent_id LEFT JOIN batch b ON b.id = j.batch_id
WHERE j.state = 'succeeded' AND (:id = 0 OR j.id = :id) ORDER BY j.id DESC LIMIT :limit"""
TRAJECTORIES = f"""
SELECT * FROM ({tables.TRAJECTORIES})
WHERE (:run = '' OR run = :run) AND (:state = '' OR state = :state) AND (:group = '' OR "group" = :group)
ORDER BY id DESC LIMIT :limit"""
CHECKPOINTS = f"""
SELECT * FROM ({tables.CHECKPOINTS}) WHERE (:run = '' OR run = :run) AND (:state = '' OR state = :state)
ORDER BY id DESC LIMIT :limit"""
WORKERS = f"{tables.WORKERS} ORDER BY {tables.WORKERS_FIRST}"
PUSHES = f"""
SELECT * FROM ({tables.PUSHES}) WHERE (:run = '' OR run = :run) AND (:state = '' OR state = :state)
ORDER BY id DESC LIMIT :limit"""
SERVING = """
SELECT s.engine, s.name, c.step, s.state, s.created FROM serving s JOIN checkpoint c ON c.id = s.checkpoint_id
WHERE s.state <> 'gone' ORDER BY s.id"""
EVENTS_NEWEST = f"{tables.EVENTS} WHERE :run = '' OR run = :run ORDER BY id DESC LIMIT :limit"
EVENTS_TOLD = """
SELECT id, at, run, kind, ref, data FROM (SELECT * FROM event ORDER BY id DESC LIMIT 500)
WHERE kind NOT IN ('trajectory.submitted', 'job.claimed', 'push.sending') ORDER BY id DESC LIMIT :limit"""
EVENTS_AFTER = f"{tables.EVENTS} WHERE id > :after AND (:run = '' OR run = :run) ORDER BY id LIMIT :limit"


class Database:
    """A read-only connection."""

    def __init__(self, data: Path) -> None:
        """Raises CliError: NOT_RUNNING when no daemon ever ran there, FAILED when the file cannot be read."""
        path = data / DATABASE
        if not path.exists():
            raise CliError(
                NOT_RUNNING, f"there is no database {path}: no daemon has run on {data} yet", start_command(data)
            )
        self._path = path
        try:
            self._connection = open_readonly(path, 1.0)
            self._connection.execute("PRAGMA query_only = 1")
        except sqlite3.DatabaseError as error:
            raise CliError(FAILED, f"{path} cannot be read: {error}", "run artctl as the daemon's user") from None

    def rows(self, sql: str, /, **parameters: object) -> list[Row]:
        """Raises CliError(FAILED) when the file was made by another version."""
        try:
            return [_decoded(row) for row in self._connection.execute(sql, parameters)]
        except sqlite3.DatabaseError as error:
            raise CliError(
                FAILED, f"{self._path} cannot be read by this artctl: {error}", "use the artd that made it"
            ) from None

    def run_names(self) -> list[str]:
        return [name for (name,) in self._connection.execute("SELECT name FROM run ORDER BY id")]

    def checked_run(self, name: str) -> str:
        """`name`, which must exist unless empty. Raises CliError(NOT_FOUND)."""
        if name and name not in (known := self.run_names()):
            listed = f"; there is {', '.join(known[-5:])}" if known else "; there is none yet"
            raise CliError(NOT_FOUND, f"there is no run {name!r}{near(name, known)}{listed}", "artctl runs")
        return name

    def close(self) -> None:
        self._connection.close()


def _decoded(row: sqlite3.Row) -> Row:
    keys: Sequence[str] = row.keys()
    return {key: _value(key, row[key]) for key in keys}


def _value(key: str, value: Any) -> Any:
    if key in tables.JSON_COLUMNS and isinstance(value, bytes | str):
        return json.loads(value or b"{}")
    return value


def counts(rows: Sequence[Mapping[str, Any]], states: Sequence[str], column: str) -> dict[str, int]:
    """{state: number}, zero where the query had no row."""
    found = {row["state"]: int(row[column]) for row in rows}
    return {name: found.get(name, 0) for name in states}
