"""Decides what happens next, from committed rows and the time alone.

Pure functions: no clock, no I/O. The services read rows, ask here, and carry the answer out. A crash at any moment
loses nothing, because the same rows give the same answer again (docs/adr/0001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ATTEMPTS = 5
MAX_DEATHS = 2
FULL_MS = 30_000
"""The delay before a job whose result did not fit on the disk runs again. The result's staged files are removed first,
which makes the disk look as if it had room."""


@dataclass(frozen=True)
class Group:
    """A sealed train group whose trajectories can be trained. Lists of groups are ordered oldest first."""

    id: int
    size: int


@dataclass(frozen=True)
class RunView:
    """A run as its rows describe it. `job` is the kind of its unfinished job, "" for none. `sealed` holds the oldest
    trainable groups that wait, at most one batch of them."""

    state: str
    step: int
    groups_per_step: int
    flush: bool
    job: str
    sealed: tuple[Group, ...]
    open_groups: int


def batch_to_pack(run: RunView) -> tuple[Group, ...]:
    """Return the groups of the next batch, or () when none is due. A run has one train job at a time, and a batch is
    full unless the run is flushed."""
    if run.state != "active" or run.job or run.step < 0:
        return ()
    if len(run.sealed) >= run.groups_per_step:
        return run.sealed[: run.groups_per_step]
    return run.sealed if run.flush else ()


def is_stalled(run: RunView, step: int) -> bool:
    """Return whether `step` cannot be reached without further submissions: no group is open and too few groups are
    trainable."""
    waiting = run.state == "active" and 0 <= run.step < step
    return waiting and not run.job and not run.open_groups and not batch_to_pack(run)


@dataclass(frozen=True)
class JobView:
    id: int
    kind: str
    not_before: int
    cancel: bool


@dataclass(frozen=True)
class WorkerView:
    """A worker as its row describes it. `spawn` numbers its process; `state` is the state of its `process` row."""

    name: str
    state: str
    spawn: int


def job_to_claim(
    jobs: Sequence[JobView], trainer: WorkerView | None, run_state: str, pushing_live: bool, now: int
) -> JobView | None:
    """Return the oldest job that the trainer can take now, None when there is none. A trainer takes no job while it
    feeds a live push, because its weights must not change then."""
    if trainer is None or trainer.state != "ready" or pushing_live:
        return None
    for job in jobs:
        if job.not_before <= now and (run_state == "active" or job.kind == "init"):
            return job
    return None


@dataclass(frozen=True)
class Ending:
    """How a job leaves `running`: its next state, its new counts of attempts and deaths, the delay before it runs
    again, and whether its run pauses."""

    state: str
    attempts: int
    deaths: int
    delay_ms: int
    pause: bool


def after_failure(failure: str, attempts: int, deaths: int) -> Ending:
    """Return how a job leaves `running` after a failure.

    `failure` is one of: transient; permanent; rejected (the daemon refused its result); interrupted; full (the disk had
    no room for its result); died (nobody ordered the trainer's end); killed (the daemon ordered it, but not for lack of
    progress, which is transient).

    The job is quarantined and its run paused after a permanent or rejected failure, the second death or the fifth
    attempt. An interruption, an ordered end and a full disk do not count as attempts. The back-off is 2^n s up to 300
    s. A death adds none, because the supervisor already waits before it starts the next process.
    """
    if failure in ("interrupted", "killed", "full"):
        return Ending("queued", attempts, deaths, FULL_MS if failure == "full" else 0, False)
    attempts += 1
    deaths += failure == "died"
    if failure in ("permanent", "rejected") or deaths >= MAX_DEATHS or attempts >= MAX_ATTEMPTS:
        return Ending("quarantined", attempts, deaths, 0, True)
    delay = 0 if failure == "died" else min(2**attempts, 300) * 1000
    return Ending("queued", attempts, deaths, delay, False)


@dataclass(frozen=True)
class PushView:
    id: int
    checkpoint: int
    state: str
    not_before: int


@dataclass(frozen=True)
class PushPlan:
    """What to do about an engine's pushes: `supersede` prepared pushes that no longer matter, `create` a push row for
    this checkpoint, `send` this push."""

    supersede: tuple[int, ...] = ()
    create: int | None = None
    send: int | None = None


def plan_push(engine: WorkerView | None, newest: int | None, pushes: Sequence[PushView], now: int) -> PushPlan:
    """Decide what to do about an engine's pushes. Only the newest committed checkpoint matters, and each engine has at
    most one push under way.

    `newest` is that checkpoint. `pushes` holds the engine's pushes that are prepared, sending or live.
    """
    if newest is None:
        return PushPlan()
    stale = tuple(p.id for p in pushes if p.state == "prepared" and p.checkpoint != newest)
    if any(p.state == "sending" for p in pushes):
        return PushPlan(supersede=stale)
    current = next((p for p in pushes if p.checkpoint == newest and p.state in ("prepared", "live")), None)
    if current is None:
        return PushPlan(supersede=stale, create=newest)
    ready = engine is not None and engine.state == "ready" and current.state == "prepared" and current.not_before <= now
    return PushPlan(supersede=stale, send=current.id if ready else None)
