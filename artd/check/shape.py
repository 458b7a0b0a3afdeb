"""Checks that a file is artd's database: SQLite's own checks, the schema, and the documents that every reader decodes.

No other check repeats what the schema enforces (CHECK, UNIQUE, NOT NULL). SQLite's check proves that the rows obey
these constraints, and `schema` that the constraints exist.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache

import msgspec

from artd.store import migrate
from artd_schema.codec import UNREADABLE
from artd_schema.data.base import BaseModel
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import RunSpec

from .report import Outcome, Violation

OBJECTS = "SELECT type || ' ' || name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"


def sound(c: sqlite3.Connection, deep: bool) -> Outcome:
    """Run SQLite's quick_check, or with `deep` its integrity_check, which compares every index with its table."""
    pragma = "integrity_check" if deep else "quick_check"
    return Outcome.of(f"sqlite.{pragma}", "SQLite finds the file sound", _sound(c, pragma))


def _sound(c: sqlite3.Connection, pragma: str) -> Iterator[Violation]:
    try:
        for (text,) in c.execute(f"PRAGMA {pragma}"):
            if text != "ok":
                yield Violation("artd.db", text)
    except sqlite3.DatabaseError as error:
        yield Violation("artd.db", f"it cannot be checked: {error}")


def foreign_keys(c: sqlite3.Connection) -> Outcome:
    return Outcome.of("sqlite.foreign_keys", "every reference has its row", _foreign_keys(c))


def _foreign_keys(c: sqlite3.Connection) -> Iterator[Violation]:
    try:
        for table, row, parent, number in c.execute("PRAGMA foreign_key_check"):
            column = next(key[3] for key in c.execute(f"PRAGMA foreign_key_list({table})") if key[0] == number)
            where = table if row is None else f"{table} {row}"
            yield Violation(where, f"its {column} is not a row of {parent}")
    except sqlite3.DatabaseError as error:
        yield Violation("artd.db", f"it cannot be checked: {error}")


def schema(c: sqlite3.Connection) -> Outcome:
    return Outcome.of("schema", "tables, constraints and indexes are those of this artd", _schema(c))


def _schema(c: sqlite3.Connection) -> Iterator[Violation]:
    expected = _expected_objects(tuple(migrate.scripts()))
    found = {row[0]: row[1] for row in c.execute(OBJECTS)}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = (
                "is missing"
                if name not in found
                else "is unknown to artd"
                if name not in expected
                else "is defined differently"
            )
            yield Violation(name, what)


@cache
def _expected_objects(_scripts: tuple[tuple[int, str], ...]) -> dict[str, str]:
    """Return name and definition of everything that these migrations make."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        migrate.migrate(fresh)
        return dict(fresh.execute(OBJECTS).fetchall())


def runs(c: sqlite3.Connection) -> Outcome:
    return Outcome.of("run.spec", "spec, base model and routes of every run can be read", _runs(c))


def _runs(c: sqlite3.Connection) -> Iterator[Violation]:
    try:
        for row in c.execute("SELECT id AS run, name, spec, base_manifest, routes FROM run"):
            for column, kind in (("spec", RunSpec), ("base_manifest", BaseModel), ("routes", RouteShape)):
                try:
                    if column != "routes" or row[column]:
                        msgspec.json.decode(row[column], type=kind)
                except UNREADABLE as error:
                    yield Violation(f"run {row['run']}", f"{column}: {error}")
    except sqlite3.DatabaseError as error:
        yield Violation("artd.db", f"the rows cannot be read: {error}")
