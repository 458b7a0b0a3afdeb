"""What a check found. Owner of: nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

LISTED = 100
"""Violations of one check that are kept; the rest is counted."""


@dataclass(frozen=True)
class Violation:
    """what: the row or file, such as `trajectory 17` or `blobs/ab/ab12...`; text: what is wrong with it."""

    what: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """One named check. count: violations in all; violations: the first of them."""

    name: str
    promise: str
    count: int = 0
    violations: tuple[Violation, ...] = ()

    @classmethod
    def of(cls, name: str, promise: str, found: Iterable[Violation]) -> Outcome:
        rest = iter(found)
        kept = tuple(islice(rest, LISTED))
        return cls(name, promise, len(kept) + sum(1 for _ in rest), kept)

    def still(self, later: Outcome) -> Outcome:
        """The violations that a second look found again."""
        again = {violation.what for violation in later.violations}
        kept = tuple(violation for violation in self.violations if violation.what in again)
        return Outcome(self.name, self.promise, len(kept), kept)


@dataclass(frozen=True)
class Note:
    """Something that is no violation: what a crash or a deletion under way may leave. names: the first few."""

    name: str
    text: str
    count: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """seconds: by part (quick_check or integrity_check, foreign_keys, rows, files, contents)."""

    deep: bool
    outcomes: tuple[Outcome, ...]
    notes: tuple[Note, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def broken(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.count)

    @property
    def clean(self) -> bool:
        return not self.broken
