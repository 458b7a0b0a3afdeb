"""kill -9 of the daemon while others work, and what clients see of it (at crash points: tests/crash/test_points.py)."""

from __future__ import annotations

import os
import signal

import pytest

from tests.daemon.rig import fill

pytestmark = pytest.mark.asyncio


async def step_comes(rig, step):
    async with rig.run() as (_, run):
        assert (await run.wait(step, timeout=60)).step == step


async def test_killed_while_the_trainer_works(rig):
    rig.start()
    rig.script.write(hold__train__1=[])
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("train:1 1")
    rig.kill()
    rig.script.write()
    rig.start()
    await step_comes(rig, 1)
    assert [mark for mark in rig.script.marks() if mark.startswith("train:1 ")] == ["train:1 1", "train:1 2"]
    assert rig.rows("SELECT attempts, deaths, fence FROM job WHERE kind = 'train'") == [(0, 0, 2)]
    rig.check(2)


async def test_killed_with_the_result_staged_but_not_told_and_again_while_it_recovers(rig):
    rig.start()
    rig.script.write(hold__staged__1=[])
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("staged:1 1")
    rig.kill()
    rig.script.write()
    rig.arm("recover.adopted")
    rig.start(wait=False)
    assert rig.died() == -signal.SIGKILL
    rig.start()
    await step_comes(rig, 1)
    assert [mark for mark in rig.script.marks() if mark.startswith("train:1 ")] == ["train:1 1"]
    rig.check(2)


async def test_what_was_acknowledged_is_there_after_a_kill(rig):
    rig.start()
    async with rig.run(group_size=1000) as (_, run):
        await run.wait(0, timeout=60)
        for number in range(20):
            await fill(run, number)
        rig.process.kill()
    rig.died()
    assert rig.one("SELECT count(*) FROM trajectory") == 40


async def test_a_client_does_not_notice_a_restart(rig):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        await run.wait(1, timeout=60)
        rig.restart()
        await fill(run, 2)
        assert (await run.wait(2, timeout=60)).step == 2
    rig.check(4)


async def test_kill_9_of_daemon_and_harness_together_leaves_nothing(rig):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
    harness = rig.worker_pid("engine")
    os.kill(harness, signal.SIGKILL)
    rig.kill()  # and two seconds later nothing lives
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
