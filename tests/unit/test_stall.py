"""A trainer whose heartbeat goes on and whose job does not: the wired services end it, and the job is tried again.

The wire, the supervisor and the time are the test's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from artd.config import Limits, Settings
from artd.net.router import WorkerWire
from artd.services import Services
from artd.store.store import Store
from artd.training import commit as result
from artd.workforce import Boot
from artd_schema.wire import worker as w
from tests.fakes.rows import TRAINER, FakeClock, add_worker, data_dir, one, open_store, stage
from tests.fakes.steps import INSTANCE, packed_run, staged

pytestmark = pytest.mark.asyncio
STALL_S = 600.0
LOOK_S = 60.0
HOUR = range(60)


class Bench:
    """The services of one boot, and a trainer that claimed the train job of a run at step 0. kills: what was ordered."""

    def __init__(self, store: Store, root: Path, clock: FakeClock) -> None:
        self.store, self.clock = store, clock
        self.sent: list[Any] = []
        peers = mock.Mock(send=lambda peer, message, bulk=(): self.sent.append(message) or True)
        self.wire = WorkerWire(peers)
        boot = Boot(instance=INSTANCE, number=1, code=root, endpoint="", token="t")
        settings = Settings(limits=Limits(min_free_mib=1, reserve_mib=0, stall_s=STALL_S))
        nothing = mock.Mock()
        self.services = Services(store, self.wire, data_dir(root), settings, boot, nothing, nothing, nothing)
        self.dispatch, self.stalls = self.services._dispatch, self.services._stalls
        self.kills: list[tuple[str, int]] = []
        self.services.workforce.kill = lambda name, reason, spawn, traced: self.kills.append((reason, spawn))
        self.spawn = 0

    async def claim(self) -> w.Run:
        """The job, by a new process."""
        self.spawn += 1
        await add_worker(self.store, TRAINER, self.spawn)
        self.wire.register(TRAINER, self.spawn, b"peer")
        await self.dispatch._claim_next(1)
        return self.sent[-1]

    def beat(self, order: w.Run, progress: int, fence: int = 0) -> None:
        self.services.take(b"peer", w.Beat(job=order.job, fence=fence or order.fence, progress=progress), [])

    def look(self) -> None:
        """A minute is over."""
        self.clock.advance(LOOK_S)
        self.stalls.look()

    async def dies(self, ordered: bool = True) -> None:
        """The death of the process is proven."""
        self.wire.forget(TRAINER, self.spawn)
        reason = self.kills[-1][0] if self.kills else "another order"
        await self.services._worker_died(TRAINER, self.spawn, ordered, reason, f"last words of {self.spawn}")

    async def job(self) -> tuple[Any, ...]:
        (row,) = await self.store.read("SELECT state, attempts, deaths FROM job WHERE kind = 'train'")
        return tuple(row)

    async def attempt(self, order: w.Run) -> tuple[Any, ...]:
        sql = "SELECT outcome, error, evidence FROM attempt WHERE job_id = ? AND fence = ?"
        (row,) = await self.store.read(sql, (order.job, order.fence))
        return tuple(row)


@contextlib.asynccontextmanager
async def claimed(root: Path) -> AsyncIterator[tuple[Bench, w.Run]]:
    """A bench and the order of its first claim."""
    clock = FakeClock()
    async with open_store(root, clock) as store:
        await packed_run(store, root)
        it = Bench(store, root, clock)
        yield it, await it.claim()


async def test_a_job_that_stands_still_is_tried_again_after_the_death_of_its_trainer(tmp_path):
    async with claimed(tmp_path) as (it, order):
        for _ in range(10):
            it.beat(order, progress=5)
            it.look()
        assert it.kills == []
        it.beat(order, progress=5)
        it.look()
        why = f"job {order.job} (train, step 1) made no progress for 660 s (limits.stall_s)"
        assert it.kills == [(why, 1)]
        assert await it.job() == ("running", 0, 0)  # until its death is proven
        await it.dies()
        assert await it.job() == ("queued", 1, 0)
        assert await it.attempt(order) == ("transient", why, "last words of 1")
        it.clock.advance(2.1)
        again = await it.claim()
        assert (again.job, again.fence) == (order.job, 2)
        it.look()
        assert len(it.kills) == 1  # the next process begins at nothing


async def test_a_job_that_goes_on_is_left_alone(tmp_path):
    async with claimed(tmp_path) as (it, order):
        for minute in HOUR:
            it.beat(order, progress=minute // 9)  # a mark every nine minutes
            it.look()
        assert it.kills == []


@pytest.mark.parametrize("accepted", [True, False])
async def test_neither_another_fences_marks_nor_a_trainer_without_a_job_are_progress(tmp_path, accepted):
    async with claimed(tmp_path) as (it, order):
        for minute in HOUR[:12]:
            it.beat(order, minute, fence=7) if accepted else it.services.take(b"peer", w.Beat(progress=minute), [])
            it.look()
        assert [spawn for _, spawn in it.kills] == [1]


async def test_a_result_that_is_being_committed_does_not_stand_still(tmp_path, monkeypatch):
    async with claimed(tmp_path) as (it, order):
        hashing, hashed, verify = threading.Event(), threading.Event(), result.verify

        def slow(folder: Path) -> Any:
            hashing.set()
            assert hashed.wait(20)
            return verify(folder)

        monkeypatch.setattr(result, "verify", slow)
        it.beat(order, progress=5)
        report = asyncio.ensure_future(it.dispatch.take_staged(TRAINER, staged(order, stage(Path(order.dir), order))))
        await asyncio.to_thread(hashing.wait, 20)
        for _ in HOUR:
            it.beat(order, progress=5)
            it.look()
        hashed.set()
        await report
        for _ in HOUR:  # nor a trainer that has nothing to do
            it.look()
        assert it.kills == [] and await one(it.store, "SELECT step FROM run") == 1


async def test_the_fifth_time_is_quarantine(tmp_path):
    async with claimed(tmp_path) as (it, order):
        for attempt in range(1, 6):
            for _ in range(12):
                it.look()
            assert len(it.kills) == attempt
            await it.dies()
            assert await it.job() == ("queued" if attempt < 5 else "quarantined", attempt, 0)
            it.clock.advance(40.0)
            order = await it.claim()
        reason = await one(it.store, "SELECT reason FROM run")
        assert reason == f"job {order.job} is quarantined: {it.kills[-1][0]}"


async def test_only_the_job_that_stood_still_pays_for_it(tmp_path):
    """It failed by itself before the order took effect, and the same process has it again when it dies."""
    async with claimed(tmp_path) as (it, order):
        for _ in range(12):
            it.look()
        assert len(it.kills) == 1
        await it.dispatch.take_failed(
            TRAINER, w.Failed(job=order.job, fence=1, failure="interrupted", error="disk full")
        )
        await it.dispatch._claim_next(1)
        assert it.sent[-1].fence == 2
        await it.dies()
        assert await it.job() == ("queued", 0, 0)
