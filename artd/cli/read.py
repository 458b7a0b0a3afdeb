"""Reads the database for the command line: one read-only connection, and every query of the verbs.

`artd.store.selects` has the columns of the tables. The connection has `mode=ro` and `query_only`, and needs no daemon. JSON
columns are decoded.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from artd.cli.status.problems import next_for_database
from artd.store import pages, selects
from artd.store.readonly import open_readonly
from artd_schema.paths import DATABASE

from .daemon_probe import start_command
from .outcome import FAILED, NOT_FOUND, NOT_RUNNING, CliError, near

Row = dict[str, Any]

META = "SELECT key, value FROM meta"
RUNS = f"""
SELECT * FROM (
  SELECT * FROM ({selects.RUNS} AND r.{selects.UNFINISHED} ORDER BY r.id DESC LIMIT :limit)
  UNION ALL SELECT * FROM ({selects.RUNS} AND r.state = 'finished' ORDER BY r.id DESC LIMIT :limit)
) ORDER BY state = 'finished', id DESC LIMIT :limit"""
SPEC = "SELECT spec FROM run WHERE name = :run"
MODEL = """
SELECT vocab_size, routes FROM run WHERE name = :run"""
HELD = """
SELECT (SELECT count(*) FROM trajectory t WHERE t.run_id = r.id) AS trajectories, count(k.id) AS checkpoints,
  coalesce(sum(k.bytes), 0) AS bytes
FROM run r LEFT JOIN checkpoint k ON k.run_id = r.id AND k.state = 'committed' WHERE r.name = :run"""
GROUP_COUNTS = """
SELECT split, state, groups, trajectories FROM group_count WHERE run_id = :run"""
ROLLOUT_COUNT = """
SELECT count(*) AS count FROM (SELECT 1 FROM rollout WHERE run_id = :run AND state = :state LIMIT :limit)"""
JOB_COUNTS = """
SELECT state, count(*) AS count FROM job
WHERE run_id = :run AND state IN ('queued', 'running', 'succeeded', 'quarantined', 'cancelled') GROUP BY state"""
RETRYING = """
SELECT count(*) AS count FROM job WHERE run_id = :run AND state = 'queued' AND attempts > 0"""
JOB = f"{selects.JOBS} WHERE j.id = :id"
UNPACKED = """
SELECT count(*) AS dropped FROM (SELECT run_id, state, reason FROM trajectory ORDER BY id DESC LIMIT :limit) t
WHERE t.run_id = :run AND t.reason LIKE '%more than row_length%'"""
ATTEMPTS = """
SELECT fence, worker, spawn, outcome, error, evidence, started, ended FROM attempt WHERE job_id = :id ORDER BY fence"""
MEMBERS = """
SELECT t.id, g.name AS "group", t.key, t.reward, t.tokens, t.state FROM trajectory t JOIN trajectory_group g ON g.id = t.group_id
WHERE t.batch_id = :batch ORDER BY t.id"""
REPLAYABLE = """
SELECT j.id, j.kind, j.step, j.epoch, j.fence, j.learning, r.name AS run, r.spec, r.base_digest, r.base_manifest,
  k.sha, k.dir, k.lineage, k.state, k.bytes,
  p.sha AS parent_sha, p.dir AS parent_dir, p.lineage AS parent_lineage, p.state AS parent_state, p.step AS parent_step,
  p.epoch AS parent_epoch, b.payload, b.tensors, b.manifest, b.replay, b.replay_manifest
FROM job j JOIN run r ON r.id = j.run_id JOIN checkpoint k ON k.job_id = j.id
  LEFT JOIN checkpoint p ON p.id = j.parent_id LEFT JOIN batch b ON b.id = j.batch_id
WHERE j.state = 'succeeded' AND (:id = 0 OR j.id = :id) ORDER BY j.id DESC LIMIT :limit"""
WORKERS = f"{selects.WORKERS} ORDER BY {selects.WORKERS_FIRST}"
SERVING = """
SELECT s.engine, s.name, c.step, s.state, s.created FROM serving s JOIN checkpoint c ON c.id = s.checkpoint_id
WHERE s.state IN ('live', 'draining') ORDER BY s.id"""
RECENT_EVENTS = """
SELECT id, at, run, kind, ref, data FROM (SELECT * FROM event ORDER BY id DESC LIMIT 500)
WHERE kind NOT IN ('trajectory.submitted', 'job.claimed', 'push.sending') ORDER BY id DESC LIMIT :limit"""


class Database:
    """A read-only connection."""

    def __init__(self, data: Path) -> None:
        """Open the database. Raises CliError: NOT_RUNNING when no daemon ever ran there, FAILED when the file cannot be read."""
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
            raise CliError(FAILED, f"{path} cannot be read: {error}", next_for_database(error)) from None

    def rows(self, sql: str, /, **parameters: object) -> list[Row]:
        """Run a query. Raises CliError(FAILED) when the file is damaged, or was made by another version."""
        with self.explain_errors() as connection:
            return [decode(row) for row in connection.execute(sql, parameters)]

    @contextmanager
    def explain_errors(self) -> Iterator[sqlite3.Connection]:
        """Give the connection to a `with` block. Raises CliError(FAILED) as `rows` does."""
        try:
            yield self._connection
        except sqlite3.DatabaseError as error:
            raise CliError(
                FAILED, f"{self._path} cannot be read by this artctl: {error}", next_for_database(error)
            ) from None

    def page(self, what: str, **asked: Any) -> list[Row]:
        """Return one page of a table; `asked` has the fields of pages.Page. Raises CliError(FAILED) as `rows` does."""
        with self.explain_errors() as connection:
            return [decode(row) for row in pages.read(connection, pages.Page(what, **asked))]

    def run_names(self) -> list[str]:
        return [row["name"] for row in self.rows(f"SELECT name FROM run WHERE {selects.NOT_DELETED} ORDER BY id")]

    def require_run(self, name: str) -> str:
        """Return `name` if such a run exists or it is empty. Raises CliError(NOT_FOUND)."""
        if name and name not in (known := self.run_names()):
            listed = f"; the newest are {', '.join(known[-5:])}" if known else "; there is none yet"
            raise CliError(NOT_FOUND, f"there is no run {name!r}{near(name, known)}{listed}", "artctl runs")
        return name

    def find_run(self, name: str) -> str:
        """Return the named run, else the one that is not finished, else the newest. Raises CliError(NOT_FOUND)."""
        if name:
            return self.require_run(name)
        newest = self.rows(RUNS, limit=1)
        if not newest:
            raise CliError(NOT_FOUND, "there is no run yet", "artctl status")
        return str(newest[0]["name"])

    def close(self) -> None:
        self._connection.close()


def decode(row: sqlite3.Row) -> Row:
    """Return a row with its JSON columns decoded."""
    keys: Sequence[str] = row.keys()
    return {key: _value(key, row[key]) for key in keys}


def _value(key: str, value: Any) -> Any:
    if key not in selects.JSON_COLUMNS or not isinstance(value, bytes | str):
        return value
    try:
        return json.loads(value or b"{}")
    except ValueError:
        return {}  # a damaged row: `artd check` names it, and its run is paused for that reason


def counts(rows: Sequence[Mapping[str, Any]], states: Sequence[str], column: str) -> dict[str, int]:
    """Return {state: number}, with zero for a state that has no row."""
    found = {row["state"]: int(row[column]) for row in rows}
    return {name: found.get(name, 0) for name in states}
