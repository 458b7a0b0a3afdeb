"""Says how many there are: runs that may be unfinished beside each other, and engines of a run.

Everything is keyed by run and by worker (docs/adr/0004-keys-by-run-and-replica.md). Only `admission_error` says "one", so
a change that allows several runs begins there. Pure.
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


def engines_of(run: int, spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the engines that serve a run."""
    return tuple(engine_name(run, replica) for replica in range(spec.engine.replicas))


@dataclass(frozen=True)
class EngineHealth:
    """What an engine's rows say of it. serves: it has a live step; failures: of pushes to it, in a row; broken: nothing starts it again."""

    serves: bool
    failures: int
    broken: bool


def may_serve(engine: EngineHealth, most: int) -> bool:
    """Return whether an engine serves, or may do so by itself. `most`: failures in a row after which an engine counts as bad."""
    return engine.serves or (engine.failures < most and not engine.broken)


def share_of(gpus: Sequence[int], replica: int, replicas: int) -> tuple[int, ...]:
    """Return the GPUs of one engine, of those that the engines of a run have together. Where there are fewer GPUs than engines, engines share
    them."""
    return tuple(gpus[replica::replicas]) or (gpus[replica % len(gpus)],) if gpus else ()
