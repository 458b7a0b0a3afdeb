"""Says how many there are: runs that may be unfinished beside each other, and engines of a run.

Everything else is keyed by run and by worker (docs/adr/0004-keys-by-run-and-replica.md). Only these functions say
"one", so a change that allows more begins here. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from artd_schema.run.spec import RunSpec
from artd_schema.wire.worker_names import engine_name


@dataclass(frozen=True)
class Unfinished:
    """A run that is active or paused."""

    name: str
    state: str
    step: int


def admission_error(unfinished: Sequence[Unfinished]) -> str:
    """Return why no run may be created beside the unfinished ones, "" when one may. Today artd trains one run at a time."""
    if not unfinished:
        return ""
    run = unfinished[0]
    return (
        f"artd trains one run at a time, and run {run.name!r} is {run.state} at step {run.step}: attach to it, or create this one when"
        " it is finished. `artctl status` shows what it does"
    )


def engine_count(spec: RunSpec) -> int:
    """Return how many engines serve a run. Today each run has one; a field of the spec will say how many."""
    return 1


def engines_of(run: int, spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the engines that serve a run."""
    return tuple(engine_name(run, replica) for replica in range(engine_count(spec)))
