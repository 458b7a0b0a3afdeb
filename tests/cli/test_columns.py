"""One word per thing: `--json`, the rows of the Python client and the schema call a column by the same name."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from artd.cli.artctl.lists import LISTINGS
from artd.store import selects
from artd.store.migrate import migrate
from artd.store.pages import QUERIES
from tests.cli.conftest import Call
from tests.cli.rows import Made

DOCUMENT = Path(__file__).parents[2] / "docs/cli-json.md"
ADDED = {"alive", "next"}  # what the command line finds out by itself
SOURCES = {
    "runs": "run", "jobs": "job", "trajectories": "trajectory", "groups": "trajectory_group", "rollouts": "rollout", "batches": "batch",
    "checkpoints": "checkpoint", "pushes": "push", "workers": "process", "events": "event",
}  # fmt: skip
BESIDE = {"trajectories": "trajectory_data"}
"""Tables that hold the rest of a row."""
DERIVED = {
    "run", "group",  # names instead of numbers
    "served", "failure", "batch_tokens", "batch_covered", "parent_step", "step", "responses", "superseded",  # of joined rows
}  # fmt: skip


@pytest.fixture(scope="module")
def schema() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    return connection


def columns(schema: sqlite3.Connection, sql: str) -> set[str]:
    return {name for name, *_ in schema.execute(f"SELECT * FROM ({sql}) LIMIT 0").description}


@pytest.mark.parametrize("what", LISTINGS)
def test_the_command_line_and_clients_have_the_same_columns(
    what: str, made: Made, artctl: Call, schema: sqlite3.Connection
) -> None:
    (row, *_) = json.loads(artctl(what, "--json")[1])[what]
    shown = {key for key in row if not key.endswith("_iso")} - ADDED
    assert shown == columns(schema, QUERIES[what])


@pytest.mark.parametrize("what", QUERIES)
def test_a_column_is_called_as_in_the_schema(what: str, schema: sqlite3.Connection) -> None:
    sources = {SOURCES[what], BESIDE.get(what, SOURCES[what])}
    own = {row[1] for table in sources for row in schema.execute(f"PRAGMA table_info({table})")}
    found = columns(schema, QUERIES[what])
    assert found - DERIVED <= own, found - own


@pytest.mark.parametrize("what", QUERIES)
def test_every_column_is_documented(what: str, schema: sqlite3.Connection) -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and f"`{what}`" in line]
    assert any(columns(schema, QUERIES[what]) <= set(line.replace("`", " ").split()) for line in rows), rows


def test_json_is_decoded_under_the_same_names(schema: sqlite3.Connection) -> None:
    blobs = {
        row[1]
        for table in (*SOURCES.values(), *BESIDE.values())
        for row in schema.execute(f"PRAGMA table_info({table})")
        if row[2] == "BLOB"
    }
    shown = set().union(*(columns(schema, sql) for sql in QUERIES.values()))
    assert blobs & shown == selects.JSON_COLUMNS
