"""States a promise about rows as one SQL query that finds its violations.

The first column of a query names the row, and its column name is the entity; the other columns say what is wrong.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .report import Outcome, Violation


@dataclass(frozen=True)
class Invariant:
    """One promise. `name` is for example `batch.job`, `promise` says what holds, `sql` returns the violations, one a row."""

    name: str
    promise: str
    sql: str

    def violations(self, c: sqlite3.Connection) -> Outcome:
        """Return the violations. A database that is too damaged to answer is a violation too."""
        return Outcome.of(self.name, self.promise, self._find(c))

    def _find(self, c: sqlite3.Connection) -> Iterator[Violation]:
        try:
            for row in c.execute(self.sql):
                yield violation(row)
        except sqlite3.DatabaseError as error:
            yield Violation("artd.db", f"the rows cannot be read: {error}")


def violation(row: sqlite3.Row) -> Violation:
    """Return a violation from a query's row: `{"batch": 3, "state": "packed"}` becomes `batch 3`: `state packed`."""
    names = row.keys()
    others = ", ".join(f"{_words(name)} {_show(row[name])}" for name in names[1:])
    return Violation(f"{_words(names[0])} {_show(row[0])}", others)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _show(value: Any) -> str:
    return "none" if value is None else f"{value!r}" if value == "" else str(value)
