"""commit and dispatch: a reported result becomes a step exactly once, or changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from artd.runs.lifecycle import set_run_state
from artd.training import commit as result
from artd.training.commit import BadResult, Stale
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import trainer_name
from tests.fakes.rows import (
    TRAINER,
    FakeClock,
    FakeWire,
    add_run,
    add_worker,
    count,
    data_dir,
    one,
    open_store,
    stage,
)
from tests.fakes.steps import claim, make_dispatch, packed_run, staged

pytestmark = pytest.mark.asyncio


class World:
    """A run at step 0 with one train job claimed, and the dispatcher that claimed it."""

    def __init__(self, store, data, wire, dispatch, order):
        self.store, self.data, self.wire, self.dispatch, self.order = store, data, wire, dispatch, order

    async def report(self, sha, **changes):
        """Staged, and the daemon's last answer."""
        await self.dispatch.take_staged(TRAINER, staged(self.order, sha, **changes))
        return self.wire.sent[-1][1]

    async def unchanged(self):
        assert await one(self.store, "SELECT step FROM run") == 0
        assert await count(self.store, "checkpoint") == 1
        assert await count(self.store, "trajectory", "state = 'trained'") == 0


async def make(store, tmp_path, **changes):
    data = await packed_run(store, tmp_path, **changes)
    wire = FakeWire(trainer=1)
    dispatch = make_dispatch(store, data, wire)
    await add_worker(store, "trainer")
    await dispatch._claim_next(1)
    (order,) = wire.of(w.Run)
    return World(store, data, wire, dispatch, order)


async def test_the_order_names_everything_that_the_trainer_needs(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        order = it.order
        assert (order.kind, order.step, order.epoch, order.fence) == ("train", 1, 1, 1)
        assert Path(order.batch).is_file() and Path(order.manifest).is_file()
        assert Path(order.manifest).name == order.batch_sha
        assert order.parent is not None and (Path(order.parent.dir) / "manifest.json").is_file()
        assert await one(store, "SELECT state FROM process WHERE kind = 'trainer'") == "busy"


async def test_a_commit_is_one_whole_step(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        answer = await it.report(stage(Path(it.order.dir), it.order), seconds={"train": 2.0})
        assert isinstance(answer, w.Committed) and answer.checkpoint.step == 1
        assert (Path(answer.checkpoint.dir) / "weights.bin").read_bytes() == b"step 1"
        assert not Path(it.order.dir).exists()
        assert await one(store, "SELECT step FROM run") == 1
        for table, state in [("batch", "trained"), ("trajectory_group", "trained")]:
            assert await one(store, f"SELECT state FROM {table}") == state
        assert await count(store, "trajectory", "state = 'trained'") == 2
        (job,) = await store.read("SELECT * FROM job WHERE kind = 'train'")
        assert (job["state"], job["worker"]) == ("succeeded", None) and job["ended"]
        seconds = msgspec.json.decode(job["seconds"])
        assert seconds["train"] == 2.0 and {"pack", "commit"} <= seconds.keys()
        assert await one(store, "SELECT outcome FROM attempt WHERE job_id = ?", job["id"]) == "succeeded"
        assert await one(store, "SELECT value FROM metric WHERE step = 1 AND name = 'loss'") == 0.5
        assert await count(store, "push", "state = 'prepared'") == 2
        assert await one(store, "SELECT state FROM process WHERE kind = 'trainer'") == "ready"
        assert not it.dispatch._claims


async def test_the_same_report_again_is_committed_again_and_changes_nothing(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        sha = stage(Path(it.order.dir), it.order)
        first = await it.report(sha)
        events = await count(store, "event")
        assert await it.report(sha) == first
        assert await count(store, "event") == events and await count(store, "checkpoint") == 2


async def test_reports_at_the_same_time_commit_once(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        message = staged(it.order, stage(Path(it.order.dir), it.order))
        await asyncio.gather(*(it.dispatch.take_staged(TRAINER, message) for _ in range(5)))
        assert await count(store, "checkpoint") == 2 and it.wire.of(w.Fenced) == []


async def test_an_old_fence_is_fenced_and_its_files_go(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        await it.dispatch.take_back(TRAINER, 1, True, "killed")
        await add_worker(store, "trainer", 2)
        it.wire.connected[TRAINER] = 2
        await it.dispatch._claim_next(1)
        newer = it.wire.of(w.Run)[-1]
        assert (newer.job, newer.fence) == (it.order.job, 2)
        answer = await it.report(stage(Path(it.order.dir), it.order))
        assert answer == w.Fenced(job=it.order.job, fence=1)
        assert not Path(it.order.dir).exists()
        await it.unchanged()
        assert await one(store, "SELECT fence FROM job WHERE state = 'running'") == 2
        assert it.dispatch._claims and it.dispatch._claims[TRAINER].run.fence == 2
        await it.dispatch.take_failed(
            TRAINER, w.Failed(job=it.order.job, fence=1, failure="permanent", error="an old life's")
        )
        assert it.wire.of(w.Fenced)[-1] == answer
        assert await one(store, "SELECT fence FROM job WHERE state = 'running'") == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", "other"), ("step", 2), ("epoch", 9), ("lineage", 1), ("parent", "0" * 64), ("batch", "0" * 64),
     ("base_digest", "0" * 64)],
)  # fmt: skip
async def test_a_result_for_something_else_is_refused(tmp_path, field, value):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        answer = await it.report(stage(Path(it.order.dir), it.order, **{field: value}))
        assert answer == w.Ack(job=it.order.job, fence=it.order.fence)
        await it.unchanged()
        (job,) = await store.read("SELECT * FROM job WHERE kind = 'train'")
        assert job["state"] == "quarantined" and f"the checkpoint's {field} is" in job["error"]
        assert await one(store, "SELECT state FROM run") == "paused"
        assert await one(store, "SELECT state FROM batch") == "packed"


async def harm_file(folder):
    (folder / "weights.bin").write_bytes(b"step X")
    return "weights.bin does not have the sha256"


async def lose_file(folder):
    (folder / "weights.bin").unlink()
    return "weights.bin is not both"


async def add_file(folder):
    (folder / "core.1234").write_bytes(b"")
    return "core.1234 is not both"


async def lose_manifest(folder):
    (folder / "manifest.json").unlink()
    return "cannot be read"


async def break_manifest(folder):
    (folder / "manifest.json").write_bytes(b'{"run": 3}')
    return "cannot be read"


@pytest.mark.parametrize("harm", [harm_file, lose_file, add_file, lose_manifest, break_manifest])
async def test_the_workers_word_is_not_enough(tmp_path, harm):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        sha = stage(Path(it.order.dir), it.order)
        text = await harm(Path(it.order.dir))
        assert isinstance(await it.report(sha), w.Ack)
        await it.unchanged()
        assert text in await one(store, "SELECT error FROM job WHERE kind = 'train'")


async def test_another_manifest_than_reported_and_another_folder_are_refused(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        stage(Path(it.order.dir), it.order)
        assert isinstance(await it.report("0" * 64), w.Ack)
        assert "is not what the worker reported" in await one(store, "SELECT error FROM job WHERE kind = 'train'")
        await it.unchanged()
    (tmp_path / "b").mkdir()
    async with open_store(tmp_path / "b") as store:
        it = await make(store, tmp_path / "b")
        elsewhere = tmp_path / "b" / "elsewhere"
        sha = stage(elsewhere, it.order)
        assert isinstance(await it.report(sha, dir=str(elsewhere)), w.Ack)
        await it.unchanged()


async def test_a_cancelled_job_is_not_committed(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        await store.write(lambda c: c.execute("UPDATE job SET cancel = 1 WHERE id = ?", (it.order.job,)))
        assert isinstance(await it.report(stage(Path(it.order.dir), it.order)), w.Fenced)
        await it.unchanged()
        assert await one(store, "SELECT state FROM job WHERE kind = 'train'") == "cancelled"
        assert await one(store, "SELECT state FROM batch") == "abandoned"
        assert await count(store, "trajectory", "state = 'queued' AND batch_id IS NULL") == 2
        assert await one(store, "SELECT state FROM trajectory_group") == "sealed"
        assert not list(it.data.checkpoints.glob("*/*s000001*")), "a folder of no checkpoint stayed"


async def test_a_finished_run_takes_no_step_and_a_paused_one_does(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        await store.write(lambda c: set_run_state(c, 0, 1, "paused", "x"))
        assert isinstance(await it.report(stage(Path(it.order.dir), it.order)), w.Committed)
    (tmp_path / "b").mkdir()
    async with open_store(tmp_path / "b") as store:
        it = await make(store, tmp_path / "b")
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        assert isinstance(await it.report(stage(Path(it.order.dir), it.order)), w.Fenced)
        await it.unchanged()


@pytest.mark.parametrize("change", ["step = 5", "checkpoint_id = NULL"])
async def test_the_newest_checkpoint_is_compared_and_swapped(tmp_path, change):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        stage(Path(it.order.dir), it.order)
        sha, manifest = result.verify(Path(it.order.dir))
        await store.write(lambda c: c.execute(f"UPDATE run SET {change}"))
        with pytest.raises(Stale, match="not at step 0"):
            await store.write(lambda c: result.commit(c, 0, it.data, "x", sha, manifest, {}))
        assert await count(store, "checkpoint") == 1  # the row inserted before the check went with it


async def test_failures_requeue_or_quarantine(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path)
        job = it.order.job
        for fence, failure, state in [
            (1, "interrupted", "queued"),
            (2, "transient", "queued"),
            (3, "permanent", "quarantined"),
        ]:
            await it.dispatch.take_failed(
                TRAINER,
                w.Failed(job=job, fence=fence, failure=failure, error=f"{failure}!\ntrace", trace=f"in step {fence}"),
            )
            assert it.wire.sent[-1][1] == w.Ack(job=job, fence=fence)
            (row,) = await store.read("SELECT * FROM job WHERE id = ?", (job,))
            assert (row["state"], row["error"]) == (state, f"{failure}!\ntrace")
            clock.advance(10)
            await it.dispatch._claim_next(1)
        assert await one(store, "SELECT reason FROM run") == f"job {job} is quarantined: permanent!"
        attempts = await store.read("SELECT outcome, evidence FROM attempt WHERE job_id = ? ORDER BY fence", (job,))
        assert [row[0] for row in attempts] == ["interrupted", "transient", "permanent"]
        assert [row[1] for row in attempts] == ["in step 1", "in step 2", "in step 3"]
        await it.dispatch.take_failed(TRAINER, w.Failed(job=job, fence=1, failure="transient", error="late"))
        assert it.wire.sent[-1][1] == w.Fenced(job=job, fence=1)


async def test_a_transient_failure_waits_before_it_is_claimed_again(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path)
        await it.dispatch.take_failed(TRAINER, w.Failed(job=it.order.job, fence=1, failure="transient", error="x"))
        await it.dispatch._claim_next(1)
        assert len(it.wire.of(w.Run)) == 1
        clock.advance(2.1)
        await it.dispatch._claim_next(1)
        assert [run.fence for run in it.wire.of(w.Run)] == [1, 2]


async def test_two_deaths_that_nobody_ordered_are_quarantine_and_ordered_ones_cost_nothing(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        for spawn, ordered, state in [
            (1, True, "queued"),
            (2, False, "queued"),
            (3, True, "queued"),
            (4, False, "quarantined"),
        ]:
            await it.dispatch.take_back(TRAINER, spawn, ordered, "Segmentation fault", f"last words of {spawn}")
            assert await one(store, "SELECT state FROM job WHERE kind = 'train'") == state
            await add_worker(store, "trainer", spawn + 1)
            it.wire.connected[TRAINER] = spawn + 1
            await it.dispatch._claim_next(1)
        (job,) = await store.read("SELECT * FROM job WHERE kind = 'train'")
        assert (job["deaths"], job["attempts"], job["error"]) == (2, 2, "Segmentation fault")
        deaths = await store.read("SELECT error, evidence FROM attempt WHERE outcome = 'died' ORDER BY fence")
        assert [tuple(row) for row in deaths] == [("Segmentation fault", f"last words of {n}") for n in (2, 4)]
        assert await one(store, "SELECT state FROM run") == "paused"


async def test_a_death_of_an_older_process_does_not_touch_the_newer_ones_job(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        await it.dispatch.take_back(TRAINER, 0, False, "an older one")
        assert await one(store, "SELECT state FROM job WHERE kind = 'train'") == "running"
        assert it.dispatch._claims


async def test_a_process_that_is_no_longer_the_trainer_is_fenced_out(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        late = staged(it.order, stage(Path(it.order.dir), it.order))
        assert await it.dispatch.late(late) is None  # its end is still being taken: it asks again
        assert Path(it.order.dir).is_dir()
        await it.dispatch.take_back(TRAINER, 1, True, "its lease was over")
        Path(it.order.dir).mkdir(parents=True)  # it was not dead, and wrote
        fenced = w.Fenced(job=it.order.job, fence=1)
        assert await it.dispatch.late(w.Beat(job=it.order.job, fence=1)) == fenced
        assert Path(it.order.dir).is_dir()  # it writes still: its files go when it has ended
        assert await it.dispatch.late(late) == fenced
        assert not Path(it.order.dir).exists()
        failed = w.Failed(job=it.order.job, fence=1, failure="interrupted", error="fenced")
        assert await it.dispatch.late(failed) == fenced
        await it.unchanged()


async def test_a_result_that_was_committed_is_so_for_a_process_that_is_gone_too(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        sha = stage(Path(it.order.dir), it.order)
        answer = await it.report(sha)
        assert isinstance(answer, w.Committed)
        assert await it.dispatch.late(staged(it.order, sha)) == answer


async def test_a_lost_order_is_sent_again(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path)
        clock.advance(6)
        it.dispatch._send_again()
        assert len(it.wire.of(w.Run)) == 2
        it.dispatch.take_accepted(TRAINER, w.Accepted(job=it.order.job, fence=1))
        clock.advance(6)
        it.dispatch._send_again()
        assert len(it.wire.of(w.Run)) == 2


async def test_verify_names_what_is_wrong(tmp_path):
    with pytest.raises(BadResult, match="cannot be read"):
        result.verify(tmp_path / "nowhere")


async def test_claim_takes_the_first_checkpoint_first(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        order = await claim(store, data_dir(tmp_path))
        assert (order.kind, order.step, order.epoch, order.parent, order.batch) == ("init", 0, 0, None, "")


async def test_a_death_during_the_commit_does_not_harm_a_result_that_is_whole(tmp_path):
    async with open_store(tmp_path) as store:
        it = await make(store, tmp_path)
        report = stage(Path(it.order.dir), it.order)
        committing = asyncio.ensure_future(it.report(report))
        await asyncio.sleep(0)  # it is on its way
        await it.dispatch.take_back(TRAINER, it.wire.connected[TRAINER], False, "killed by SIGKILL")
        assert isinstance(await committing, w.Committed)
        assert await one(store, "SELECT step FROM run") == 1
        assert await one(store, "SELECT deaths FROM job WHERE kind = 'train'") == 0


async def test_a_job_is_given_to_its_own_runs_trainer_only(tmp_path):
    async with open_store(tmp_path) as store:
        data, wire = data_dir(tmp_path), FakeWire(trainer=1)
        await add_run(store)
        await add_worker(store, "trainer")
        wire.connected = {trainer_name(2): 1}
        dispatch = make_dispatch(store, data, wire)
        await dispatch._claim_next(1)
        assert not wire.of(w.Run)
        wire.connected = {TRAINER: 1}
        await dispatch._claim_next(1)
        assert wire.of(w.Run)
