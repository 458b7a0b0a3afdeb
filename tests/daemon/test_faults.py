"""Workers that die, fail and lie: what the daemon makes of it."""

from __future__ import annotations

import os
import signal

import pytest

from artd_client import Conflict, Failed
from tests.daemon.rig import fill

pytestmark = pytest.mark.asyncio


async def test_a_trainer_killed_in_the_middle_costs_its_job_one_attempt(rig):
    rig.start()
    rig.script.write(hold__train__1=[1])
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("train:1 1")
        os.kill(rig.worker_pid("trainer"), signal.SIGKILL)
        await run.wait(1, timeout=60)
        assert rig.rows("SELECT fence, deaths, state FROM job WHERE kind = 'train'") == [(2, 1, "succeeded")]
        (outcome,) = rig.rows("SELECT outcome, error FROM attempt WHERE fence = 1 AND job_id = 2")
        assert outcome[0] == "died" and "SIGKILL" in outcome[1]
    rig.check(2)


async def test_a_job_that_kills_its_trainer_twice_is_quarantined_and_can_be_retried(rig):
    rig.start()
    rig.script.write(die__1=[1, 2])
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        with pytest.raises(Failed, match="is paused: job 2 is quarantined") as caught:
            await run.wait(1, timeout=60)
        assert "SIGKILL" in str(caught.value)
        (job,) = await client.jobs(states=["quarantined"])
        assert (job["id"], job["deaths"]) == (2, 2)
        assert rig.one("SELECT state FROM batch") == "packed"
        assert (await run.wait(0, timeout=60)).step == 0, "a paused run still serves"
        await client.retry(job["id"])
        await run.wait(1, timeout=60)
        with pytest.raises(Conflict, match="only a quarantined job"):
            await client.retry(job["id"])
    rig.check(2)


async def test_a_lying_trainer_is_caught_and_cancel_frees_its_trajectories(rig):
    rig.start()
    rig.script.write(damage__1=[1])
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        with pytest.raises(Failed, match=r"weights\.bin does not have the sha256"):
            await run.wait(1, timeout=60)
        (job,) = await client.jobs(states=["quarantined"])
        rig.script.write()
        await client.cancel(job["id"])
        assert {row["state"] for row in await run.trajectories()} == {"queued"}
        await run.resume()
        await run.wait(1, timeout=60)
        assert sorted(row["state"] for row in await run.batches()) == ["abandoned", "trained"]
    rig.check(2)


async def test_a_running_job_can_be_cancelled(rig):
    rig.start()
    rig.script.write(hold__staged__1=[1])
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("staged:1 1")
        await client.cancel(2)
        rig.script.write()
        rig.until(lambda: rig.one("SELECT state FROM job WHERE id = 2") == "cancelled", "the cancelled job")
        assert rig.one("SELECT state FROM run") == "paused"
        await run.resume()
        await run.wait(1, timeout=60)
    rig.check(2)


async def test_a_push_that_fails_its_canary_restarts_the_engine(rig):
    rig.start()
    rig.script.write(bad__1=[2])
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        await run.wait(1, timeout=60)
        push = next(row for row in await run.pushes() if row["step"] == 1)
        assert (push["state"], push["attempts"], push["source"]) == ("live", 1, "disk")
        engine = next(row for row in await client.workers() if row["kind"] == "engine")
        assert (engine["state"], engine["spawn"], engine["restarts"]) == ("ready", 2, 1)
    rig.check(2)


async def test_an_engine_that_dies_while_it_serves_comes_back_with_the_newest(rig):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        os.kill(rig.worker_pid("engine"), signal.SIGKILL)
        rig.until(lambda: rig.rows("SELECT 1 FROM serving WHERE spawn = 2 AND state = 'live'"), "the second engine")
        assert rig.rows("SELECT spawn FROM serving WHERE state = 'live'") == [(2,)]
        assert (await run.wait(0, timeout=60)).step == 0
    rig.check(0)


async def test_a_trainer_that_cannot_feed_a_push_makes_it_come_from_disk(rig):
    rig.start()
    rig.script.write(unfed=[], hold__push__1=[2])
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        await run.wait(1, timeout=60)
        push = next(row for row in await run.pushes() if row["step"] == 1)
        assert (push["state"], push["source"], push["fence"]) == ("live", "disk", 3)
    rig.check(2)


async def test_an_engine_that_dies_at_its_start_says_why(rig):
    rig.start()
    rig.script.write(dead=[1])
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
    sql = "SELECT json_extract(data, '$.error') FROM event WHERE kind = 'worker.backoff' AND ref = ?"
    error = rig.one(sql, "engine-1-0")
    assert "could not start" in error and "no such device\nlast words" in error


async def test_a_trainer_that_dies_at_its_start_says_why_and_is_tried_again(rig):
    rig.start()
    rig.script.write(exit=[1])
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        trainer = next(row for row in await client.workers() if row["kind"] == "trainer")
        assert (trainer["state"], trainer["spawn"]) == ("ready", 2)
    error = rig.one(
        "SELECT json_extract(data, '$.error') FROM event WHERE kind = 'worker.backoff' AND ref = 'trainer-1'"
    )
    assert "exit status 1" in error and "told to end at spawn 1" in error


async def test_resume_starts_a_broken_engine_again(rig):
    """Five deaths in a row break a worker: nothing starts it again until an operator says so."""
    rig.script.write(dead=[])
    rig.start()
    async with rig.run() as (_, run):
        state = "SELECT state FROM process WHERE kind = 'engine'"
        rig.until(lambda: rig.rows(state) == [("broken",)], "the engine to break", 40.0)
        rig.script.write()
        await run.resume()
        await run.wait(0, timeout=60)
