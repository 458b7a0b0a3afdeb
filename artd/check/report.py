"""Holds the results of a check: outcomes with their violations, and notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

LISTED = 100
"""The most violations that an outcome keeps; it counts the rest."""


@dataclass(frozen=True)
class Violation:
    """A broken promise. `what` is the row or file, such as `trajectory 17` or `blobs/ab/ab12...`; `text` says what is wrong."""

    what: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """The result of one named check. `count` is the number of all violations; `violations` holds the first of them."""

    name: str
    promise: str
    count: int = 0
    violations: tuple[Violation, ...] = ()

    @classmethod
    def of(cls, name: str, promise: str, found: Iterable[Violation]) -> Outcome:
        """Count the violations of `found` and keep the first `LISTED`."""
        rest = iter(found)
        kept = tuple(islice(rest, LISTED))
        return cls(name, promise, len(kept) + sum(1 for _ in rest), kept)

    def still(self, later: Outcome) -> Outcome:
        """Return the violations of this outcome that a later outcome has too."""
        again = {violation.what for violation in later.violations}
        kept = tuple(violation for violation in self.violations if violation.what in again)
        return Outcome(self.name, self.promise, len(kept), kept)


@dataclass(frozen=True)
class Note:
    """A finding that is no violation: something that a crash or a deletion under way may leave. `names` holds the first few."""

    name: str
    text: str
    count: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The results of all checks. `seconds` gives the time of each part: quick_check or integrity_check, foreign_keys, rows,
    files, contents."""

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
