"""One owner a table: one module writes it, by named functions; every service asks that module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SQL = re.compile(r"\b(?:INSERT(?: OR [A-Z]+)? INTO|REPLACE INTO|UPDATE|DELETE FROM) (?!SET\b)([a-z_]+|\{\})")
WORDS = re.compile(r"INSERT|REPLACE|UPDATE|DELETE|\bmove\(")
"""One of these stands in every source that writes a table; to parse the others takes seconds."""
OWNERS = ("artd/tables/", "artd/store/")
UPGRADES = "artd/store/migrate.py"
"""Brings an older schema's rows to this one's: it may touch every table, before any owner does."""
ELSEWHERE = {
    ("meta", "artd/store/writer.py"): "the writer notes a full disk by itself, below the store that imports it",
    ("sqlite_sequence", "artd/backups/instance.py"): "a table of SQLite's own, which only a restore touches",
    ("{}", "artd/store/store.py"): "`move`: its callers name the table, and are looked at themselves",
}


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; a formatted value is `{}`."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def moved(tree: ast.AST) -> Iterator[str]:
    """The table of every call of `move`, the store's function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "move":
            table = node.args[1]
            yield str(table.value) if isinstance(table, ast.Constant) else "{}"


def written(source: str) -> set[str]:
    """Tables that this source writes; `{}` for one whose name it makes."""
    if not WORDS.search(source):
        return set()
    tree = ast.parse(source)
    return {found for text in texts(tree) for found in SQL.findall(text)} | set(moved(tree))


@cache
def writers() -> dict[str, frozenset[str]]:
    """table -> files that write it."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in ("artd", "schema", "workers", "client"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            for table in written(path.read_text()) if name != UPGRADES else ():
                found[table].add(name)
    return {table: frozenset(files) for table, files in found.items()}


def test_each_table_is_written_by_one_module() -> None:
    found = {table: set(files) for table, files in writers().items()}
    for table, file in ELSEWHERE:
        found[table].remove(file)  # KeyError: the exception is no longer one
    several = {table: sorted(files) for table, files in found.items() if len(files) > 1}
    outside = {file for files in found.values() for file in files if not file.startswith(OWNERS)}
    assert not several and not outside and not found["{}"], (several, outside, found["{}"])


def test_every_table_has_an_owner() -> None:
    schema = (ROOT / "schema/artd_schema/sql/0001_initial.sql").read_text()
    tables = set(re.findall(r"^CREATE TABLE ([a-z_]+)", schema, re.M))
    kept_by_triggers = {"exchange_count"}
    assert {"run", "job", "push", "trajectory", "checkpoint", "batch", "serving"} < tables
    assert tables - kept_by_triggers == writers().keys() - {"sqlite_sequence", "{}"}


@pytest.mark.parametrize(
    ("source", "tables"),
    [
        ('c.execute("UPDATE run SET flush = 0")', {"run"}),
        ('c.execute("INSERT INTO job (id)" " VALUES (1)")', {"job"}),
        ('c.execute(f"INSERT OR REPLACE INTO meta ({names})")', {"meta"}),
        ('c.execute(f"DELETE FROM {table} WHERE id = ?")', {"{}"}),
        ('"INSERT INTO request (name) VALUES (?) ON CONFLICT (name) DO UPDATE SET name = 1"', {"request"}),
        ('move(c, "push", 1, "live")', {"push"}),
        ("move(c, table, 1, state)", {"{}"}),
        ('c.execute("SELECT id FROM run")', set()),
    ],
)
def test_writes_are_found(source: str, tables: set[str]) -> None:
    assert written(source) == tables
