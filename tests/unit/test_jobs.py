"""jobs: quarantine with its evidence, and the ways out of it; a fence never goes back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from artd.api.job_orders import end_job, retry
from artd.errors import Conflict, NotFound
from artd.runs.lifecycle import Runs, set_run_state
from artd.store.store import Store
from artd_schema.wire import worker as w
from tests.fakes.rows import EVERY_STEP, TRAINER, FakeWire, add_run, add_worker, count, one, open_store, stage
from tests.fakes.steps import make_dispatch, packed_run, staged, train_next

pytestmark = pytest.mark.asyncio


@dataclass
class Bench:
    """A run whose first train job was claimed. orders: what the trainer was told."""

    store: Store
    data: Any
    wire: FakeWire
    dispatch: Any

    @property
    def orders(self) -> list[w.Run]:
        return self.wire.of(w.Run)

    async def do(self, fn, *arguments):
        return await self.store.write(lambda c: fn(c, self.store.clock.now_ms(), *arguments))

    async def claim(self) -> w.Run:
        await add_worker(self.store, "trainer")
        await self.dispatch._claim_next(1)
        return self.orders[-1]

    async def quarantine(self) -> int:
        """Its numbers are not finite; the job's id."""
        order = self.orders[-1]
        await self.dispatch.take_failed(
            TRAINER, w.Failed(job=order.job, fence=order.fence, failure="permanent", error="NaN")
        )
        return order.job

    async def report(self, order: w.Run) -> Any:
        """The answer to a result that arrives now."""
        await self.dispatch.take_staged(TRAINER, staged(order, stage(Path(order.dir), order)))
        return self.wire.sent[-1][1]

    async def states(self) -> tuple[Any, ...]:
        """Of run, job, batch, and of every group and trajectory, which are alike."""
        found = [await one(self.store, f"SELECT DISTINCT state FROM {name}") for name in ("run", "batch")]
        job = await one(self.store, "SELECT state FROM job WHERE id = 2")
        rest = [await one(self.store, f"SELECT DISTINCT state FROM {n}") for n in ("trajectory_group", "trajectory")]
        return (found[0], job, found[1], *rest)


async def bench(store: Store, root: Path) -> Bench:
    data = await packed_run(store, root)
    wire = FakeWire(trainer=1)
    made = Bench(store, data, wire, make_dispatch(store, data, wire))
    await made.claim()
    return made


async def test_discard_ends_the_job_with_its_trajectories_and_the_run_goes_on(tmp_path):
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        job = await it.quarantine()
        assert await it.states() == ("paused", "quarantined", "packed", "packed", "packed")
        assert await it.do(end_job, job, True) is False
        assert await it.states() == ("active", "cancelled", "abandoned", "discarded", "discarded")
        reasons = await store.read("SELECT reason FROM trajectory UNION ALL SELECT reason FROM trajectory_group")
        assert {row[0] for row in reasons} == {f"its batch was discarded (artctl discard {job})"}
        assert await count(store, "trajectory", "batch_id = 1") == 2, "which batch it was can still be seen"
        events = await count(store, "event")
        await it.do(end_job, job, True)
        assert await count(store, "event") == events, "asked again, it changes nothing"
        with pytest.raises(Conflict, match="is discarded already"):
            await it.do(end_job, job, False)
        with pytest.raises(Conflict, match="is discarded; only a quarantined"):
            await it.do(retry, job)
        assert (await train_next(store, it.data)).step == 1


@pytest.mark.parametrize("discard", [True, False])
async def test_a_run_that_its_operator_paused_stays_paused(tmp_path, discard):
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        order = it.orders[-1]
        await it.do(set_run_state, 1, "paused", "operator")
        await it.dispatch.take_failed(TRAINER, w.Failed(job=order.job, fence=1, failure="transient", error="x"))
        await it.do(end_job, order.job, discard)
        assert (await it.states())[:2] == ("paused", "cancelled")
        reasons = "operator" if discard else f"operator; job {order.job} was cancelled"
        assert await one(store, "SELECT reason FROM run") == reasons


@pytest.mark.parametrize("first", ["operator", "quarantine"])
@pytest.mark.parametrize(
    "order", [lambda job: (end_job, job, True), lambda job: (retry, job)], ids=["discard", "retry"]
)
async def test_discard_and_retry_lift_no_pause_but_the_quarantines(tmp_path, first, order):
    """The operator pauses because rewards are wrong, before or after the job fails: the run stays paused."""
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        if first == "operator":
            await it.do(set_run_state, 1, "paused", "rewards are wrong")
        job = await it.quarantine()
        if first == "quarantine":
            await it.do(set_run_state, 1, "paused", "rewards are wrong")
        await it.do(*order(job))
        assert (await it.states())[0] == "paused"
        assert await one(store, "SELECT reason FROM run") == "rewards are wrong"
        await it.do(set_run_state, 1, "active", "")
        assert (await it.states())[0] == "active"


async def test_a_retry_that_is_repeated_under_its_request_id_counts_once(tmp_path):
    """A client sends it again after a reconnect; meanwhile the job was quarantined once more."""
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        job = await it.quarantine()
        await it.do(retry, job, "7f")
        await it.claim()
        await it.quarantine()
        await it.do(retry, job, "7f")
        assert (await it.states())[:2] == ("paused", "quarantined")
        await it.do(retry, job, "80")
        assert (await it.states())[:2] == ("active", "queued")


async def test_a_running_job_is_discarded_when_its_worker_has_stopped(tmp_path):
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        order = it.orders[-1]
        assert await it.do(end_job, order.job, True) is True
        assert await it.states() == ("active", "running", "packed", "packed", "packed")
        with pytest.raises(Conflict, match="is being discarded already"):
            await it.do(end_job, order.job, False)
        assert isinstance(await it.report(order), w.Fenced), "a discarded result was committed"
        assert await it.states() == ("active", "cancelled", "abandoned", "discarded", "discarded")


@pytest.mark.parametrize("moment", ["quarantined", "queued", "running", "succeeded"])
async def test_a_late_result_of_an_attempt_before_the_retry_is_fenced(tmp_path, moment):
    """Staged and reported at any moment: the batch is trained once, by the attempt that holds the newest fence."""
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        late = it.orders[-1]
        job = await it.quarantine()

        async def arrives(now: str) -> None:
            if now == moment:
                assert await it.report(late) == w.Fenced(job=job, fence=1)
                assert not Path(late.dir).exists(), "its files stay behind"

        await arrives("quarantined")
        await it.do(retry, job)
        assert await it.states() == ("active", "queued", "packed", "packed", "packed")
        await arrives("queued")
        order = await it.claim()
        assert order.fence == 2
        await arrives("running")
        assert isinstance(await it.report(order), w.Committed)
        await arrives("succeeded")
        assert await it.states() == ("active", "succeeded", "trained", "trained", "trained")
        assert await count(store, "checkpoint", "step = 1") == 1


async def test_a_result_that_is_refused_is_told_apart_from_numbers_that_are_not_finite(tmp_path):
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        order = it.orders[-1]
        sha = stage(Path(order.dir), order)
        (Path(order.dir) / "weights.bin").write_bytes(b"step X")
        await it.dispatch.take_staged(TRAINER, staged(order, sha))
        assert await it.states() == ("paused", "quarantined", "packed", "packed", "packed")
        assert await one(store, "SELECT outcome FROM attempt WHERE job_id = ?", order.job) == "rejected"
        assert not Path(order.dir).exists(), "gigabytes that nobody needs, until the next start"


async def test_a_report_that_comes_again_while_its_files_are_removed_is_left_alone(tmp_path, monkeypatch):
    """Two that remove one folder meet files that are gone; the death of the trainer waits for the first one, too."""
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        order, removed, calls = it.orders[-1], threading.Event(), []
        sha = stage(Path(order.dir), order)
        (Path(order.dir) / "weights.bin").write_bytes(b"step X")

        def remove(path):
            calls.append(path)
            removed.wait(10)

        monkeypatch.setattr("artd.training.dispatch.fs.remove_tree", remove)
        first = asyncio.ensure_future(it.dispatch.take_staged(TRAINER, staged(order, sha)))
        while not calls:
            await asyncio.sleep(0.01)
        await it.dispatch.take_staged(TRAINER, staged(order, sha))
        died = asyncio.ensure_future(it.dispatch.take_back(TRAINER, 1, False, "gone"))
        await asyncio.sleep(0.1)
        assert calls == [Path(order.dir)] and not died.done()
        removed.set()
        await first
        await died


async def test_jobs_that_cannot_be_ended_or_retried(tmp_path):
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        for discard in (True, False):
            with pytest.raises(NotFound, match="no job 9"):
                await it.do(end_job, 9, discard)
            with pytest.raises(Conflict, match="finish the run instead"):
                await it.do(end_job, 1, discard)
        job = await it.quarantine()
        await it.do(set_run_state, 1, "finished", "")
        with pytest.raises(Conflict, match="run 'r' is finished"):
            await it.do(retry, job)


@pytest.mark.parametrize("waits", ["queued", "quarantined"])
async def test_a_finished_run_has_no_job_that_waits_for_ever(tmp_path, waits):
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        if waits == "quarantined":
            await it.quarantine()
        else:
            await it.dispatch.take_back(TRAINER, 9, ordered=True, error="restart")
        assert (await it.states())[1] == waits
        await Runs(store, lambda _: None, EVERY_STEP).set_state("r", "finished")
        assert await it.states() == ("finished", "cancelled", "abandoned", "discarded", "discarded")


async def test_the_job_that_runs_when_its_run_is_finished_ends_with_its_worker(tmp_path):
    async with open_store(tmp_path) as store:
        it = await bench(store, tmp_path)
        await Runs(store, lambda _: None, EVERY_STEP).set_state("r", "finished")
        assert (await it.states())[:2] == ("finished", "running")
        assert isinstance(await it.report(it.orders[-1]), w.Fenced), "a step was committed into a finished run"
        assert await it.states() == ("finished", "cancelled", "abandoned", "discarded", "discarded")


async def test_the_first_job_of_a_run_that_is_finished_at_once_is_cancelled(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        await Runs(store, lambda _: None, EVERY_STEP).set_state("r", "finished")
        assert await one(store, "SELECT state FROM job") == "cancelled"
        assert await count(store, "event", "kind = 'job.cancelled'") == 1
