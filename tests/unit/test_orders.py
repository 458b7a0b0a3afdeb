"""An order is for the process that it was claimed for: one that died meanwhile leaves none, and the next one gets its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from artd.dispatch import TRAINER
from artd.push import ENGINE
from artd_schema import worker as w
from tests.fakes.rows import FakeWire, add_run, add_worker, data_dir, one, open_store
from tests.fakes.steps import commit_next, make_dispatch, make_pusher

pytestmark = pytest.mark.asyncio


async def test_a_trainer_that_dies_as_its_job_is_claimed(tmp_path: Path):
    data, wire = data_dir(tmp_path), FakeWire(trainer=1)
    async with open_store(tmp_path) as store:
        await add_run(store)
        await add_worker(store, TRAINER, 1)
        dispatch = make_dispatch(store, data, wire)
        claim = dispatch._claim_due

        def claim_and_die(c):
            run = claim(c)
            wire.connected.pop("trainer")
            return run

        dispatch._claim_due = claim_and_die
        await dispatch._claim_next()
        assert await one(store, "SELECT state FROM job") == "running"
        assert wire.sent == [] and dispatch._claim is None
        await dispatch.died(1, False, "killed")
        dispatch._claim_due = claim
        wire.connected["trainer"] = 2
        await add_worker(store, TRAINER, 2)
        await dispatch._claim_next()
        assert [(run.job, run.fence) for run in wire.of(w.Run)] == [(1, 2)]


async def test_an_engine_that_dies_while_the_gateway_is_asked_to_hold(tmp_path: Path):
    data = data_dir(tmp_path)
    async with open_store(tmp_path) as store:
        await add_run(store)
        await commit_next(store, data)
        await add_worker(store, ENGINE, 1, "ready", "/e.sock")
        wire = FakeWire(engine=1, gateway=1)
        pusher = make_pusher(store, data, wire)
        sending = asyncio.create_task(pusher._send_due())
        while not wire.of(w.Hold):
            await asyncio.sleep(0)
        await pusher.engine_died("killed")
        wire.connected["engine"] = 2
        pusher.held(w.Held(push=1, engine=ENGINE, in_flight=0))
        pusher.gateway_died()
        await sending
        assert wire.of(w.Push) == [] and pusher._sending is None
        await add_worker(store, ENGINE, 2, "ready", "/e.sock")
        sending = asyncio.create_task(pusher._send_due())
        while len(wire.of(w.Hold)) < 2:
            await asyncio.sleep(0)
        pusher.gateway_died()  # nothing admits: there is nothing to wait for
        await sending
        assert [push.fence for push in wire.of(w.Push)] == [2]
