"""recover: whatever the last daemon left, the next boot goes on from it, and a second look changes nothing."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from artd import recover as module
from artd.recover import identify, recover
from artd.runs.lifecycle import set_run_state
from artd.store import fs
from artd.training import commit as result
from artd_schema.wire import worker as w
from tests.fakes.rows import ENGINE, FakeWire, add_run, add_worker, count, data_dir, one, open_store, stage
from tests.fakes.steps import claim, commit_next, make_pusher, packed_run, serve

pytestmark = pytest.mark.asyncio


async def running_job(store, tmp_path):
    """A run at step 0 whose train job is running when the daemon dies; the order and the data folder."""
    data = await packed_run(store, tmp_path)
    return await claim(store, data), data


def dump(store) -> list[str]:
    """The whole database as text."""
    connection = sqlite3.connect(store.path)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


async def twice(store, data):
    """Recover, and again: the second time changes nothing."""
    await recover(store, data)
    first = dump(store)
    files = sorted(str(path) for path in data.root.rglob("*"))
    await recover(store, data)
    assert dump(store) == first and sorted(str(path) for path in data.root.rglob("*")) == files


async def stepped(store):
    assert await one(store, "SELECT step FROM run") == 1
    assert await count(store, "checkpoint") == 2
    assert await one(store, "SELECT state FROM job WHERE kind = 'train'") == "succeeded"
    assert await count(store, "trajectory", "state = 'trained'") == 2
    assert await count(store, "event", "kind = 'step.committed' AND ref = '1'") == 1
    assert await count(store, "event", "kind = 'job.requeued'") == 0


async def requeued(store):
    assert await one(store, "SELECT step FROM run") == 0 and await count(store, "checkpoint") == 1
    (job,) = await store.read("SELECT * FROM job WHERE kind = 'train'")
    assert (job["state"], job["attempts"], job["deaths"], job["worker"]) == ("queued", 0, 0, None)
    assert await count(store, "trajectory", "state = 'packed'") == 2


async def test_a_result_that_lies_staged_is_adopted_once(tmp_path):
    async with open_store(tmp_path) as store:
        order, data = await running_job(store, tmp_path)
        stage(Path(order.dir), order)
        await twice(store, data)
        await stepped(store)
        folder = data.root / await one(store, "SELECT dir FROM checkpoint WHERE step = 1")
        assert result.verify(folder)[1].job == order.job and not Path(order.dir).exists()


async def test_a_result_that_was_published_but_not_committed_is_adopted_once(tmp_path):
    async with open_store(tmp_path) as store:
        order, data = await running_job(store, tmp_path)
        stage(Path(order.dir), order)
        _, manifest = result.verify(Path(order.dir))
        result.publish(data, Path(order.dir), manifest)
        await twice(store, data)
        await stepped(store)


@pytest.mark.parametrize("whole", [True, False])
async def test_the_loop_does_no_work_on_files(tmp_path, monkeypatch, whole):
    """A step of a large model is gigabytes, and the heart beats in the loop."""
    async with open_store(tmp_path) as store:
        order, data = await running_job(store, tmp_path)
        stage(Path(order.dir), order)
        if not whole:
            (Path(order.dir) / "weights.bin").write_bytes(b"st")
        for name in ("l0-s000007-j9-f3", f"l0-s000001-j{order.job}-f{order.fence}"):
            (data.checkpoints / "r" / name).mkdir(parents=True)
        (data.tmp / "job-9-f3").mkdir()
        seen = []

        def watch(owner, name):
            real = getattr(owner, name)

            def watched(*given):
                seen.append((name, threading.current_thread() is threading.main_thread()))
                return real(*given)

            monkeypatch.setattr(owner, name, watched)

        for owner, name in (
            (fs, "write_again"), (fs, "remove_tree"), (result, "verify"), (result, "publish"), (module, "_move_aside"),
        ):  # fmt: skip
            watch(owner, name)
        await recover(store, data)
        assert {name for name, _ in seen} >= {"write_again", "verify", "remove_tree", "_move_aside"}
        assert ("publish" in {name for name, _ in seen}) == whole
        assert [name for name, in_loop in seen if in_loop] == []


async def test_without_a_result_the_job_waits_again_and_costs_nothing(tmp_path):
    async with open_store(tmp_path) as store:
        _, data = await running_job(store, tmp_path)
        await twice(store, data)
        await requeued(store)
        assert await one(store, "SELECT outcome FROM attempt WHERE job_id = 2") == "interrupted"
        assert (await claim(store, data)).fence == 2


@pytest.mark.parametrize(
    "harm", ["half a file", "no manifest", "a stranger's file", "an older fence", "another parent"]
)
async def test_a_result_that_is_not_whole_or_not_this_jobs_is_not_adopted(tmp_path, harm):
    async with open_store(tmp_path) as store:
        order, data = await running_job(store, tmp_path)
        changes = {"an older fence": {"fence": 0}, "another parent": {"parent": "0" * 64}}.get(harm, {})
        folder = Path(order.dir)
        stage(folder, order, **changes)
        if harm == "half a file":
            (folder / "weights.bin").write_bytes(b"st")
        elif harm == "no manifest":
            (folder / "manifest.json").unlink()
        elif harm == "a stranger's file":
            (folder / "extra").write_bytes(b"")
        await twice(store, data)
        await requeued(store)
        assert not list(data.tmp.iterdir()) and not list(data.checkpoints.glob("*/*s000001*"))


async def test_a_result_of_a_cancelled_job_is_not_adopted(tmp_path):
    async with open_store(tmp_path) as store:
        order, data = await running_job(store, tmp_path)
        stage(Path(order.dir), order)
        await store.write(lambda c: c.execute("UPDATE job SET cancel = 1 WHERE id = ?", (order.job,)).rowcount)
        await twice(store, data)
        assert await one(store, "SELECT state FROM job WHERE kind = 'train'") == "cancelled"
        assert await one(store, "SELECT step FROM run") == 0
        assert await count(store, "trajectory", "state = 'queued'") == 2
        assert not list(data.checkpoints.glob("*/*s000001*"))


async def test_a_result_of_a_finished_run_is_not_adopted_and_of_a_paused_one_is(tmp_path):
    for state, expected in (("finished", 0), ("paused", 1)):
        root = tmp_path / state
        root.mkdir()
        async with open_store(root) as store:
            order, data = await running_job(store, root)
            stage(Path(order.dir), order)
            await store.write(lambda c, state=state: set_run_state(c, 0, 1, state, "x"))
            await twice(store, data)
            assert await one(store, "SELECT step FROM run") == expected


async def test_an_init_result_is_adopted(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        order = await claim(store, data)
        stage(Path(order.dir), order)
        await twice(store, data)
        assert await one(store, "SELECT step FROM run") == 0
        assert await count(store, "push", "state = 'prepared'") == 1


async def test_what_was_served_or_sent_is_forgotten(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await serve(store, 1, data)
        await twice(store, data)
        assert await count(store, "serving", "state <> 'gone'") == 0
        assert await one(store, "SELECT state FROM push") == "superseded"
        (row,) = await store.read("SELECT * FROM process WHERE kind = 'engine'")
        assert (row["state"], row["pid"], row["address"], row["spawn"]) == ("stopped", None, "", 1)


async def test_a_push_under_way_goes_back_and_a_restart_costs_no_attempt(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        for boot in range(1, 8):
            await add_worker(store, "engine", boot, "ready", "/s")
            pusher = make_pusher(store, data, FakeWire(trainer=1, engine=boot))
            await pusher._send_due(ENGINE)
            assert await one(store, "SELECT state FROM push") == "sending"
            await recover(store, data)
        (push,) = await store.read("SELECT * FROM push")
        assert (push["state"], push["attempts"], push["fence"]) == ("prepared", 0, 7)
        assert await one(store, "SELECT state FROM run") == "active"


async def test_leftovers_are_swept_and_committed_folders_are_not(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        kept = data.root / await one(store, "SELECT dir FROM checkpoint")
        stranger = data.checkpoints / "r" / "l0-s000007-j9-f3"
        stranger.mkdir()
        (data.tmp / "pack-s3-17-0").mkdir()
        (data.tmp / "job-9-f3").mkdir()
        (data.tmp / "file").write_text("x")
        await twice(store, data)
        assert kept.is_dir() and not stranger.exists() and (data.unknown / stranger.relative_to(data.root)).is_dir()
        assert [path.name for path in data.tmp.iterdir()] == ["file"], "only what bears a name of artd's goes"


async def test_an_old_lives_word_after_recovery_changes_nothing(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await add_worker(store, "engine", 1, "ready", "/s")
        pusher = make_pusher(store, data, FakeWire(engine=1))
        await pusher._send_due(ENGINE)
        push = pusher._sending[ENGINE].message
        await recover(store, data)
        await make_pusher(store, data, FakeWire(engine=2)).live(
            w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0)
        )
        assert await count(store, "serving") == 0 and await one(store, "SELECT state FROM push") == "prepared"


async def test_identity_counts_boots_and_follows_the_file(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        first, boot = await store.write(lambda c: identify(c, data, 1))
        again, next_boot = await store.write(lambda c: identify(c, data, 2))
        assert (boot, next_boot) == (1, 2) and first == again and len(first) == 32
        await store.write(lambda c: c.execute("UPDATE meta SET value = '1:2' WHERE key = 'place'").rowcount)
        copied, _ = await store.write(lambda c: identify(c, data, 3))
        assert copied != first
