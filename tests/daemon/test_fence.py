"""A worker past its lease: one that can be killed is dead before its job is given to another; one that cannot is fenced out.

What is dead is read from /proc, what is served from replies, what is trained from the marks of the fake trainer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from artd_schema.paths import process_ticks
from tests.daemon.rig import Rig, fill

pytestmark = pytest.mark.asyncio
LEASE_S = 3.0
"""Longer than a busy machine keeps a living worker from its heartbeat."""
REMOTE = (sys.executable, "-m", "tests.daemon.remote")


@pytest.fixture(name="rig")
def with_a_short_lease(rig: Rig) -> Rig:
    text = rig.config.read_text()
    rig.config.write_text(text.replace("[limits]\n", f"[limits]\nlease_s = {LEASE_S}\n"))
    return rig


def stop(rig: Rig, name: str) -> tuple[int, int]:
    """SIGSTOP a worker, not its guardian; its pid and start ticks."""
    pid = rig.worker_pid(name)
    ticks = process_ticks(pid)
    assert ticks is not None
    os.kill(pid, signal.SIGSTOP)
    return pid, ticks


def dead(who: tuple[int, int]) -> bool:
    return process_ticks(who[0]) != who[1]


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
async def test_a_stopped_trainer_is_dead_before_its_job_is_given_away_and_its_batch_is_not_blamed(rig: Rig, times: int):
    """The one that is stopped holds the memory: whoever is given its job before its death dies of that. Engine and gateway
    are stopped with the first, and replaced too."""
    fences = list(range(1, times + 1))
    rig.script.write(memory=[], hold__train__1=fences)
    rig.start()
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        others = [stop(rig, "engine"), stop(rig, "gateway")]
        for fence in fences:
            rig.reached(f"train:1 {fence}")
            stopped = stop(rig, "trainer")
            rig.reached(f"train:1 {fence + 1}")
            assert dead(stopped)
        assert (await run.wait(1, timeout=60)).step == 1
        job = next(job for job in await client.jobs() if job["kind"] == "train")
        assert (job["state"], job["attempts"], job["deaths"]) == ("succeeded", 0, 0)
        assert "silent" in rig.one("SELECT error FROM attempt WHERE job_id = 2 AND fence = 1")
        assert all(map(dead, others))
        rig.until(lambda: rig.rows("SELECT 1 FROM serving WHERE spawn > 1 AND state = 'live'"), "another engine")
    rig.check(2)


@pytest.mark.slow  # tests/unit/test_lease.py has the same with a clock of its own
async def test_a_daemon_that_was_stopped_itself_ends_nobody(rig: Rig):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        before = [rig.worker_pid(name) for name in ("trainer", "engine", "gateway")]
        os.kill(rig.pid, signal.SIGSTOP)
        await asyncio.sleep(2 * LEASE_S)
        os.kill(rig.pid, signal.SIGCONT)
        await fill(run, 1)
        assert (await run.wait(1, timeout=60)).step == 1
        assert [rig.worker_pid(name) for name in ("trainer", "engine", "gateway")] == before
    rig.check(2)


async def test_workers_that_cannot_be_killed_change_nothing_when_they_wake(rig: Rig):
    rig.script.write(http=1, sign=1, hold__train__1=[1], hold__verify__1=[2])
    rig.start(under=REMOTE)
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("train:1 1")
        trainer = stop(rig, "trainer")
        rig.reached("verify:1 2")  # another trainer did it
        engine = stop(rig, "engine")
        assert (await run.wait(1, timeout=60)).step == 1  # in another engine
        before = folders(rig)
        rig.script.write(http=1, sign=1)
        for pid, _ in (trainer, engine):
            os.kill(pid, signal.SIGCONT)
        rig.until(lambda: fences(rig, "fenced:") == {"1"}, "the answer to the trainer's report")
        rig.until(lambda: "2" in fences(rig, "live:"), "the engine's Live")
        rig.until(lambda: not list((rig.data / "tmp").iterdir()), "an empty tmp")
        assert folders(rig) == before
        await fill(run, 2)
        assert (await run.wait(2, timeout=60)).step == 2
        assert not dead(trainer) and not dead(engine)
        assert fences(rig, "train:2") == {"1"}
        answer = await run.openai().completions.create(model=run.model, prompt="Hi", max_tokens=64)
        newest = rig.one("SELECT sha FROM checkpoint WHERE step = 2")
        assert answer.choices[0].text.startswith(newest[:32])
    rig.check(4)
    rig.kill()  # and what was let go dies with its daemon


def folders(rig: Rig) -> list[str]:
    return sorted(path.name for path in (rig.data / "checkpoints").rglob("*"))


def fences(rig: Rig, point: str) -> set[str]:
    """Of the marks of this point."""
    return {mark.split()[1] for mark in rig.script.marks() if mark.startswith(point)}
