"""What happens next, decided from committed rows and the time alone.

Owner of: nothing; pure: no clock, no I/O. The services read rows, ask here, and carry the answer out; a crash at any
moment loses nothing, because the same rows give the same answer again (docs/adr/0001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ATTEMPTS = 5
MAX_DEATHS = 2
FULL_MS = 30_000
"""Until a job whose result found no space is tried again: what it had staged is gone by then, and looks like space."""


@dataclass(frozen=True)
class Group:
    """A sealed train group whose trajectories are trainable, oldest first in any list of them."""

    id: int
    size: int


@dataclass(frozen=True)
class RunView:
    """A run as its rows tell it. job: kind of its unfinished job, or "" for none; sealed: the oldest
    trainable groups that wait, a batch of them at most."""

    state: str
    step: int
    groups_per_step: int
    flush: bool
    job: str
    sealed: tuple[Group, ...]
    open_groups: int


def batch_to_pack(run: RunView) -> tuple[Group, ...]:
    """Groups of the next batch, or () when none is due: one train job at a time, full batches unless flushed."""
    if run.state != "active" or run.job or run.step < 0:
        return ()
    if len(run.sealed) >= run.groups_per_step:
        return run.sealed[: run.groups_per_step]
    return run.sealed if run.flush else ()


def is_stalled(run: RunView, step: int) -> bool:
    """Whether `step` can never come without further submissions: no rollout is open and too few groups are
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
    """spawn: which process; state: of the `process` row."""

    name: str
    state: str
    spawn: int


def job_to_claim(
    jobs: Sequence[JobView], trainer: WorkerView | None, run_state: str, pushing_live: bool, now: int
) -> JobView | None:
    """The oldest job that the trainer can take now. While it feeds a live push its weights must not move."""
    if trainer is None or trainer.state != "ready" or pushing_live:
        return None
    for job in jobs:
        if job.not_before <= now and (run_state == "active" or job.kind == "init"):
            return job
    return None


@dataclass(frozen=True)
class Ending:
    """How a job leaves `running`: its next state, whether the attempt and the death count, and the delay in ms."""

    state: str
    attempts: int
    deaths: int
    delay_ms: int
    pause: bool


def after_failure(failure: str, attempts: int, deaths: int) -> Ending:
    """failure: transient, permanent, rejected (the daemon refused its result), interrupted, full (no space for its
    result), died (nobody ordered it) or killed (ordered, but for want of progress: that is transient).

    permanent, rejected, the second death or the fifth attempt quarantine the job and pause the run; an interruption
    or a full disk costs nothing. Back-off 2^n s up to 300 s; a death has none: the supervisor already waits before it starts another
    process.
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
    """supersede: prepared pushes that no longer matter; create: checkpoint that needs a push row; send: push to
    start."""

    supersede: tuple[int, ...] = ()
    create: int | None = None
    send: int | None = None


def plan_push(engine: WorkerView | None, newest: int | None, pushes: Sequence[PushView], now: int) -> PushPlan:
    """Only the newest committed checkpoint matters, and at most one push is under way per engine.

    pushes: those of the engine in prepared, sending or live.
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
