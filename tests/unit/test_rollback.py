"""rollback: an older step is the newest again, in a lineage of its own, and nothing is used or trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from artd.errors import Conflict, NotFound
from artd.packing import service
from artd.retention.checkpoints import CheckpointRetention
from artd.runs.lifecycle import Runs, set_run_state
from artd.runs.rollback import rollback
from artd.serving.routing_table import load_table
from artd.store.blobs import Blobs
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.fakes.rows import (
    ENGINE,
    EVERY_STEP,
    FakeWire,
    add_run,
    add_worker,
    count,
    data_dir,
    make_ingest,
    one,
    open_store,
    submit,
    turn,
)
from tests.fakes.steps import claim, commit_next, make_pusher, pack, room, serve, train_next

pytestmark = pytest.mark.asyncio


async def trained(store, root: Path, steps: int = 3, **spec):
    """A data folder whose run has been trained and served so far."""
    data = data_dir(root)
    await add_run(store, **spec)
    await commit_next(store, data)
    await serve(store)
    for _ in range(steps):
        await train_next(store, data)
        await serve(store)
    return data


async def back(store, step: int, lineage: int = 0) -> None:
    await store.write(lambda c: rollback(c, 0, api.Rollback(run="r", step=step, lineage=lineage)))


async def chain(store) -> list[tuple[int, int]]:
    """(lineage, step) from the run's newest checkpoint back to the first."""
    rows = await store.read(
        "WITH RECURSIVE chain AS (SELECT k.* FROM run r JOIN checkpoint k ON k.id = r.checkpoint_id UNION ALL"
        " SELECT p.* FROM chain c JOIN checkpoint p ON p.id = c.parent_id) SELECT lineage, step FROM chain"
    )
    return [tuple(row) for row in rows]


async def test_training_goes_on_from_the_older_step(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path)
        await back(store, 1)
        assert tuple((await store.read("SELECT step, lineage, state FROM run"))[0]) == (1, 1, "active")
        ref = await train_next(store, data)
        assert (ref.step, ref.lineage, ref.epoch) == (2, 1, 4), "a policy epoch was used again"
        assert "/l1-s000002-" in ref.dir
        assert await chain(store) == [(1, 2), (0, 1), (0, 0)]
        parent = "SELECT p.step FROM checkpoint k JOIN checkpoint p ON p.id = k.parent_id WHERE k.sha = ?"
        assert await one(store, parent, ref.sha) == 1
        assert await count(store, "trajectory", "state = 'trained'") == 8, "what the left steps trained stays trained"
        assert await count(store, "batch", "state = 'trained'") == 4
        assert await count(store, "metric", "name = 'loss' AND step = 2") == 2, "the left lineage's history is gone"


async def test_a_second_rollback_opens_a_third_lineage(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path)
        await back(store, 2)
        await back(store, 1, lineage=1)
        await train_next(store, data)
        assert await chain(store) == [(2, 2), (0, 1), (0, 0)]
        await back(store, 0, lineage=2)
        await train_next(store, data)
        assert await chain(store) == [(3, 1), (0, 0)]
        assert await count(store, "checkpoint", "abandoned = 1") == 4
        epochs = [row[0] for row in await store.read("SELECT epoch FROM checkpoint ORDER BY id")]
        assert epochs == sorted(set(epochs))


async def test_the_same_request_again_changes_nothing(tmp_path):
    """Also when the new lineage has steps already: a client resends what the daemon did before it died."""
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path)
        await back(store, 1)
        await back(store, 1)
        await train_next(store, data)
        await train_next(store, data)
        events = await count(store, "event")
        await back(store, 1)
        assert await count(store, "event") == events
        assert await chain(store) == [(1, 3), (1, 2), (0, 1), (0, 0)]
        with pytest.raises(Conflict, match="was rolled back meanwhile: it is at step 3"):
            await back(store, 0)


async def test_what_is_refused(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path, steps=2, keep_checkpoints=2)
        with pytest.raises(NotFound, match="no run 'x'"):
            await store.write(lambda c: rollback(c, 0, api.Rollback(run="x", step=0, lineage=0)))
        with pytest.raises(Conflict, match="r@2 is the newest step already"):
            await back(store, 2)
        with pytest.raises(NotFound, match="no checkpoint r@7; it can be rolled back to @0, @1"):
            await back(store, 7)
        await store.write(CheckpointRetention(store, data)._retire)
        with pytest.raises(Conflict, match=r"files of r@0 are deleted .* rolled back to @1"):
            await back(store, 0)
        ingest = make_ingest(store, data)
        for key, reward in (("a", 0.0), ("b", 1.0)):
            await submit(ingest, key=key, reward=reward)
        assert await pack(store, data)
        with pytest.raises(Conflict, match=r"job 4 is queued: first `artctl cancel 4` .* or `artctl discard 4`"):
            await back(store, 1)
        await claim(store, data)
        with pytest.raises(Conflict, match="job 4 is running"):
            await back(store, 1)
        assert await count(store, "checkpoint", "abandoned = 1") == 0
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        with pytest.raises(Conflict, match=r"is finished, .* continue: `artctl export r@1 DIR`, or create another run"):
            await back(store, 1)
        for step in (0, 7):
            with pytest.raises(Conflict, match="cannot continue: create another run"):
                await back(store, step)


async def test_a_step_that_was_left_is_not_gone_back_to(tmp_path):
    async with open_store(tmp_path) as store:
        await trained(store, tmp_path)
        await back(store, 1)
        for step in (2, 3):
            with pytest.raises(NotFound, match=f"no checkpoint r@{step}; it can be rolled back to @0"):
                await back(store, step, lineage=1)


async def test_a_batch_that_was_being_packed_is_packed_anew(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path)
        ingest = make_ingest(store, data)
        for key, reward in (("a", 0.0), ("b", 1.0)):
            await submit(ingest, key=key, reward=reward)
        packer = service.Packer(store, Blobs(data.blobs), data, room)
        request, groups = await store.write(packer._due)
        await back(store, 1)
        assert await packer._pack(request, groups)
        assert await count(store, "job", "state = 'queued'") == 0, "a job of the left lineage"
        assert await pack(store, data)
        assert await one(store, "SELECT step FROM job WHERE state = 'queued'") == 2


async def test_tokens_of_the_left_steps_may_still_be_submitted(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path)
        await back(store, 1)
        ingest = make_ingest(store, data)
        await submit(ingest, key="left", turns=(turn(policy_epoch=((0, 3),)),))
        assert await one(store, "SELECT epoch_max FROM trajectory WHERE key = 'left'") == 3


async def test_the_left_steps_files_go_at_once_when_nothing_needs_them(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path, keep_checkpoints=4)
        await back(store, 1)
        assert await store.write(CheckpointRetention(store, data)._retire) != []
        rows = await store.read("SELECT step FROM checkpoint WHERE state = 'committed' ORDER BY step")
        assert [row["step"] for row in rows] == [0, 1, 3], "the served one stays until it is served no more"
        await serve(store)
        await store.write(CheckpointRetention(store, data)._retire)
        rows = await store.read("SELECT step FROM checkpoint WHERE state = 'committed' ORDER BY step")
        assert [row["step"] for row in rows] == [0, 1]


@pytest.mark.parametrize(("mode", "unloaded"), [("merged", []), ("lora", ["r@3"])])
async def test_the_engine_gets_the_older_step_from_disk(tmp_path, mode, unloaded):
    """In lora mode it serves steps 2 and 3; the namesake of what was pushed is not unloaded, what was left is."""
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path, rollout_weights_mode=mode)
        await back(store, 2)
        assert (await Runs(store, lambda _: None, EVERY_STEP).info("r", False)).served == (
            -1 if mode == "merged" else 2
        )
        await add_worker(store, "trainer")
        wire = FakeWire(trainer=1, engine=1)
        pusher = make_pusher(store, data, wire)
        await pusher._send_due(ENGINE)
        await pusher._send_due(ENGINE)
        message = wire.of(w.Push)[-1]
        assert (message.name, message.source, message.checkpoint.step) == ("r@2", "disk", 2)
        await pusher.live(w.Live(push=message.push, fence=message.fence, max_abs=0.0, mean_abs=0.0))
        rows = await store.read("SELECT name FROM serving WHERE state = 'live' ORDER BY id")
        assert [row["name"] for row in rows] == ["r@2"]
        assert [m.name for m in wire.of(w.Unload)] == unloaded
        info = await Runs(store, lambda _: None, EVERY_STEP).info("r", False)
        assert (info.step, info.served, info.lineage) == (2, 2, 1)


async def test_a_push_of_a_left_step_that_was_under_way_lets_nothing_in(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path, steps=1)
        await train_next(store, data)
        wire = FakeWire(engine=1)
        pusher = make_pusher(store, data, wire)
        await pusher._send_due(ENGINE)
        await back(store, 1)
        (message,) = wire.of(w.Push)
        assert message.name == "r@2"
        await pusher.live(w.Live(push=message.push, fence=message.fence, max_abs=0.0, mean_abs=0.0))
        (engine,) = (await store.write(load_table)).engines
        assert engine.served == (), "a left step is served"
        await serve(store)
        (engine,) = (await store.write(load_table)).engines
        assert [served.name for served in engine.served] == ["r@1"]


async def test_an_older_adapter_answers_at_once(tmp_path):
    async with open_store(tmp_path) as store:
        await trained(store, tmp_path, rollout_weights_mode="lora")
        await back(store, 2)
        (engine,) = (await store.write(load_table)).engines
        assert [served.name for served in engine.served] == ["r@2"]
        op = api.WaitStep(run="r", step=2, timeout_s=0.0)
        for confirmed, answer in (({"r@2", "r@3"}, api.Pending), ({"r@2"}, api.StepInfo)):
            routed = frozenset(confirmed)
            found = await Runs(store, lambda _: None, lambda routed=routed: routed).wait(op)
            assert isinstance(found, answer), "the gateway may answer with the left step still"


async def test_waiting_looks_at_the_chain(tmp_path):
    async with open_store(tmp_path) as store:
        data = await trained(store, tmp_path)
        runs = Runs(store, lambda _: None, EVERY_STEP)

        async def wait(step: int) -> api.Answer:
            return await runs.wait(api.WaitStep(run="r", step=step, timeout_s=0.0))

        left = await wait(2)
        assert isinstance(left, api.StepInfo)
        await back(store, 1)
        assert await wait(1) == api.Pending(step=1, phase="serve", doing="bringing step 1 into the engine"), (
            "step 1 is not served"
        )
        assert isinstance(await wait(2), api.Stalled)
        await serve(store)
        assert isinstance(await wait(1), api.StepInfo)
        ref = await train_next(store, data)
        await serve(store)
        found = await wait(2)
        assert isinstance(found, api.StepInfo) and found.checkpoint == ref.sha != left.checkpoint
