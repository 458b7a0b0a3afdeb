"""A promise about rows as one SQL query that finds its violations.

Owner of: nothing. Invariants: the first column of a query names the row (its column name is the entity), the others say
what is wrong.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .report import Outcome, Violation


@dataclass(frozen=True)
class Invariant:
    """name: such as `batch.job`; promise: what holds; sql: its violations, one a row."""

    name: str
    promise: str
    sql: str

    def violations(self, c: sqlite3.Connection) -> Outcome:
        """A database too damaged to be asked is a violation too."""
        return Outcome.of(self.name, self.promise, self._found(c))

    def _found(self, c: sqlite3.Connection) -> Iterator[Violation]:
        try:
            for row in c.execute(self.sql):
                yield violation(row)
        except sqlite3.DatabaseError as error:
            yield Violation("artd.db", f"the rows cannot be read: {error}")


def violation(row: sqlite3.Row) -> Violation:
    """`{"batch": 3, "state": "packed"}` is `batch 3`: `state packed`."""
    names = row.keys()
    others = ", ".join(f"{_words(name)} {_shown(row[name])}" for name in names[1:])
    return Violation(f"{_words(names[0])} {_shown(row[0])}", others)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value!r}" if value == "" else str(value)
