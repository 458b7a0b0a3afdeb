"""An order is for the process that it was claimed for: one that died meanwhile leaves none, and the next one gets its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from artd_schema.wire import worker as w
from tests.fakes.rows import ENGINE, TRAINER, FakeWire, add_run, add_worker, data_dir, one, open_store
from tests.fakes.steps import commit_next, make_dispatch, make_pusher

pytestmark = pytest.mark.asyncio


async def test_a_trainer_that_dies_as_its_job_is_claimed(tmp_path: Path):
    data, wire = data_dir(tmp_path), FakeWire(trainer=1)
    async with open_store(tmp_path) as store:
        await add_run(store)
        await add_worker(store, TRAINER, 1)
        dispatch = make_dispatch(store, data, wire)
        claim = dispatch._claim_due

        def claim_and_die(c, run_id):
            run = claim(c, run_id)
            wire.connected.pop(TRAINER)
            return run

        dispatch._claim_due = claim_and_die
        await dispatch._claim_next(1)
        assert await one(store, "SELECT state FROM job") == "running"
        assert wire.sent == [] and not dispatch._claims
        await dispatch.take_back(TRAINER, 1, False, "killed")
        dispatch._claim_due = claim
        wire.connected[TRAINER] = 2
        await add_worker(store, TRAINER, 2)
        await dispatch._claim_next(1)
        assert [(run.job, run.fence) for run in wire.of(w.Run)] == [(1, 2)]


async def test_an_engine_that_dies_as_its_push_is_claimed(tmp_path: Path):
    data, wire = data_dir(tmp_path), FakeWire(engine=1)
    async with open_store(tmp_path) as store:
        await add_run(store)
        await commit_next(store, data)
        await add_worker(store, ENGINE, 1, "ready", "/e.sock")
        pusher = make_pusher(store, data, wire)
        claim = pusher._claim

        def claim_and_die(c, engine):
            push = claim(c, engine)
            wire.connected.pop(ENGINE)
            return push

        pusher._claim = claim_and_die
        await pusher._send_due(ENGINE)
        assert wire.sent == [] and not pusher._sending
        await pusher.engine_died(ENGINE, "killed")
        pusher._claim = claim
        wire.connected[ENGINE] = 2
        await add_worker(store, ENGINE, 2, "ready", "/e.sock")
        await pusher._send_due(ENGINE)
        assert [push.fence for push in wire.of(w.Push)] == [2]
