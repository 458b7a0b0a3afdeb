"""retain: what may go and what must stay."""

from __future__ import annotations

import pytest

from artd.retention.checkpoints import CheckpointRetention, find_leftovers
from artd.runs.lifecycle import set_run_state
from artd_schema.wire import worker as w
from tests.fakes.rows import ENGINE, FakeWire, add_run, add_worker, data_dir, one, open_store
from tests.fakes.steps import commit_next, make_pusher, train_next

pytestmark = pytest.mark.asyncio


async def steps(store, state="committed"):
    return [
        row["step"] for row in await store.read("SELECT step FROM checkpoint WHERE state = ? ORDER BY step", (state,))
    ]


async def make(store, tmp_path, newest, **changes):
    data = data_dir(tmp_path)
    await add_run(store, **changes)
    await commit_next(store, data)
    for _ in range(newest):
        await train_next(store, data)
    return data


async def supersede(store):
    await store.write(lambda c: c.execute("UPDATE push SET state = 'superseded' WHERE state = 'prepared'").rowcount)


async def test_the_newest_are_kept(tmp_path):
    async with open_store(tmp_path) as store:
        data = await make(store, tmp_path, 4, keep_checkpoints=2)
        await supersede(store)
        folders = await store.write(CheckpointRetention(store, data)._retire)
        assert await steps(store) == [3, 4] and await steps(store, "retired") == [0, 1, 2]
        assert len(folders) == 3 and all(
            (data.root / folder).is_dir() for folder in folders
        )  # rows first, files second
        assert await store.write(CheckpointRetention(store, data)._retire) == []
        swept = await store.write(lambda c: find_leftovers(c, data))
        assert sorted(swept.gone) == sorted(folders) and not swept.unknown


async def test_what_is_under_push_stays(tmp_path):
    async with open_store(tmp_path) as store:
        data = await make(store, tmp_path, 3, keep_checkpoints=1)
        await store.write(CheckpointRetention(store, data)._retire)
        assert await steps(store) == [0, 1, 2, 3]
        await supersede(store)
        await store.write(CheckpointRetention(store, data)._retire)
        assert await steps(store) == [3]


async def test_the_parent_of_unfinished_work_stays(tmp_path):
    async with open_store(tmp_path) as store:
        data = await make(store, tmp_path, 2, keep_checkpoints=1)
        await supersede(store)
        for state in ("queued", "quarantined"):
            await store.write(
                lambda c, state=state: (
                    c.execute("UPDATE job SET state = ?, ended = NULL WHERE step = 1", (state,)).rowcount
                )
            )
            await store.write(CheckpointRetention(store, data)._retire)
            assert await steps(store) == [0, 2], state


async def test_an_adapter_that_the_running_engine_was_given_stays_until_it_is_gone(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, keep_checkpoints=1, rollout_weights_mode="lora")
        await add_worker(store, "engine", 1, "ready", "/s")
        pusher = make_pusher(store, data, FakeWire(trainer=1, engine=1))
        await commit_next(store, data)
        for step in range(4):
            if step:
                await train_next(store, data)
            await pusher._send_due(ENGINE)
            push = pusher._sending[ENGINE].message
            await pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0))
        await store.write(CheckpointRetention(store, data)._retire)
        assert await steps(store) == [0, 1, 2, 3]
        await add_worker(store, "engine", 2, "starting")
        await store.write(CheckpointRetention(store, data)._retire)
        assert await steps(store) == [3]


async def test_a_finished_run_keeps_its_newest(tmp_path):
    async with open_store(tmp_path) as store:
        data = await make(store, tmp_path, 2, keep_checkpoints=1)
        await supersede(store)
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        await store.write(CheckpointRetention(store, data)._retire)
        assert await steps(store) == [2]


async def test_sweep_deletes_what_an_attempt_left_and_keeps_what_no_row_knows(tmp_path):
    async with open_store(tmp_path) as store:
        data = await make(store, tmp_path, 1)
        (data.checkpoints / "r" / "l0-s000009-j9-f1").mkdir()
        (data.checkpoints / "other" / "x").mkdir(parents=True)
        job = await one(store, "SELECT id FROM job WHERE step = 1")
        await store.write(
            lambda c: (
                c.execute(
                    "INSERT INTO attempt (job_id, fence, worker, spawn, started, ended, outcome) VALUES (?, 77, 'trainer', 1, 1, 2, 'died')",
                    (job,),
                ).rowcount
            )
        )
        (data.checkpoints / "r" / f"l0-s000001-j{job}-f77").mkdir()  # published, and its daemon died before the commit
        swept = await store.write(lambda c: find_leftovers(c, data))
        assert swept.gone == [f"checkpoints/r/l0-s000001-j{job}-f77"]
        assert swept.unknown == ["checkpoints/r/l0-s000009-j9-f1"], "a name that is not artd's stays where it is"
