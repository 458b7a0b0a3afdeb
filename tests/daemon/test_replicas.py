"""A run with two engines: one that dies, hangs or fails leaves the routes and comes back, while the other one serves.

Which engines answer is read from the gateway's replies: each fake says its own name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from artd_client import Run
from tests.awake import SOON_S
from tests.daemon.rig import Rig, fill

pytestmark = pytest.mark.asyncio
TWO = {"replicas": 2}
FIRST, SECOND = "engine-1-0", "engine-1-1"
LEASE_S = 3.0


@pytest.fixture(name="rig")
def two_engines_that_answer(rig: Rig) -> Rig:
    text = rig.config.read_text()
    rig.config.write_text(text.replace("[limits]\n", f"[limits]\nlease_s = {LEASE_S}\n"))
    rig.script.write(http=[], names=[])
    return rig


def serving(rig: Rig) -> set[str]:
    """Engines that serve the newest step, as the database has it."""
    newest = "(SELECT checkpoint_id FROM run)"
    return {
        name for (name,) in rig.rows(f"SELECT engine FROM serving WHERE state = 'live' AND checkpoint_id = {newest}")
    }


async def answers(run: Run, count: int = 4) -> set[str]:
    """The engines that answer requests which run beside each other. Each request has to be answered."""
    async with run.openai() as model:

        async def ask(number: int) -> str:
            messages = [{"role": "user", "content": f"{number}"}]
            reply = await model.chat.completions.create(model=run.model, messages=messages, max_tokens=20)
            return str(reply.choices[0].message.content)

        return set(await asyncio.gather(*(ask(number) for number in range(count))))


async def test_the_other_engine_serves_while_one_is_dead_and_that_one_comes_back(rig: Rig):
    rig.start()
    async with rig.run(engine=TWO) as (_, run):
        await run.wait(0, timeout=60, engines="all")
        assert await answers(run) == {FIRST, SECOND}
        rig.script.write(http=[], names=[], hold__push__0=[])
        os.kill(rig.worker_pid(FIRST), signal.SIGKILL)
        rig.until(lambda: serving(rig) == {SECOND}, "the first engine's leaving")
        assert await answers(run) == {SECOND}
        assert (await run.wait(0, timeout=60)).step == 0
        rig.until(lambda: len([mark for mark in rig.script.marks() if mark.startswith("push:0")]) == 3, "another push")
        assert serving(rig) == {SECOND}, "nothing is served before the push is verified"
        rig.script.write(http=[], names=[])
        await run.wait(0, timeout=60, engines="all")
        assert await answers(run) == {FIRST, SECOND}
        assert rig.rows("SELECT engine, max(spawn) FROM serving GROUP BY engine") == [(FIRST, 2), (SECOND, 1)]
    rig.check(0)


@pytest.mark.slow
async def test_an_engine_that_hangs_is_replaced(rig: Rig):
    rig.start()
    async with rig.run(engine=TWO) as (_, run):
        await run.wait(0, timeout=60, engines="all")
        os.kill(rig.worker_pid(SECOND), signal.SIGSTOP)
        rig.until(lambda: serving(rig) == {FIRST}, "the second engine's leaving", SOON_S + LEASE_S)
        assert await answers(run) == {FIRST}
        await fill(run, 1)
        assert (await run.wait(1, timeout=60)).step == 1
        await run.wait(1, timeout=60, engines="all")
        assert rig.one("SELECT spawn FROM process WHERE name = ?", SECOND) == 2
    rig.check(2)


@pytest.mark.slow
async def test_a_run_goes_on_while_all_pushes_to_one_engine_fail(rig: Rig):
    rig.script.write(http=[], names=[], **{f"bad__{SECOND}": []})
    rig.start()
    async with rig.run(engine=TWO) as (client, run):
        await run.wait(0, timeout=60)
        for step in (1, 2):
            await fill(run, step)
            await run.wait(step, timeout=60)
        rig.until(lambda: rig.one("SELECT sum(attempts) FROM push WHERE engine = ?", SECOND) >= 5, "failures", 60.0)
        assert rig.one("SELECT state FROM run") == "active" and serving(rig) == {FIRST}
        assert await answers(run) == {FIRST}
        rig.script.write(http=[], names=[])
        await run.resume()  # starts it again, and pushes at once
        await run.wait(2, timeout=60, engines="all")
        assert {row["state"] for row in await client.workers() if row["kind"] == "engine"} == {"ready"}
    rig.check(4)


@pytest.mark.slow
async def test_random_kills_of_engines_lose_nothing_and_stop_nobody(rig: Rig):
    rig.start()
    async with rig.run(engine=TWO) as (_, run):
        await run.wait(0, timeout=60, engines="all")
        for step, name in enumerate((FIRST, SECOND, FIRST), 1):
            await fill(run, step)
            with contextlib.suppress(IndexError, ProcessLookupError):  # it is dead already
                os.kill(rig.worker_pid(name), signal.SIGKILL)
            await run.wait(step, timeout=60)
        await run.wait(3, timeout=60, engines="all")
        assert await answers(run) == {FIRST, SECOND}
    rig.check(6)
