"""Rollouts by name through the real daemon and gateway: the page's own program, groups, kills."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest

from artd_client import Conflict, SyncClient
from tests.daemon.rig import ROOT, SPEC, Rig

pytestmark = pytest.mark.asyncio
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Capital?"}], "max_tokens": 8}


def program() -> str:
    """The program of docs/rollouts.md, as the body of a function."""
    section = (ROOT / "docs/rollouts.md").read_text().partition("## Rollouts by name")[2]
    (found,) = re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.M | re.S)
    return "async def program(run, judge):\n" + textwrap.indent(found, "    ")


async def test_the_program_of_the_page_trains(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora") as (_, run):
        await run.wait(0, timeout=60)
        rewards = iter((0.0, 1.0))
        names: dict = {}
        exec(program(), names)
        await names["program"](run, lambda answer: next(rewards) if answer.startswith("Paris") else None)
        assert (await run.wait(1, timeout=60)).step == 1
        rows = await run.trajectories()
        assert [(row["state"], row["reward"], row["epoch_max"]) for row in rows] == [
            ("trained", 1.0, 0),
            ("trained", 0.0, 0),
        ]
        (group,) = await run.groups()
        assert group["name"].startswith("capital-of-france-") and group["state"] == "trained"
    assert rig.rows("SELECT state FROM rollout") == [("submitted",)] * 2
    rig.check(2)


async def test_a_group_is_discarded_by_an_exception_and_sealed_without_one(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora", group_size=3) as (_, run):
        await run.wait(0, timeout=60)
        with pytest.raises(ZeroDivisionError):
            async with run.group("a") as group:
                assert len(group) == 3 and len({rollout.name for rollout in group}) == 3
                await group.rollouts[0].openai().chat.completions.create(model=run.model, **ASK)
                await group.rollouts[0].submit(1.0)
                raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            async with run.group("nothing", n=1):
                raise ZeroDivisionError
        async with run.group("nobody", n=1):
            pass
        async with run.group("b", n=2) as group:
            for index, rollout in enumerate(group):
                await rollout.openai().chat.completions.create(model=run.model, **ASK)
                await rollout.submit(float(index))
        states = {row["name"][0]: row["state"] for row in await run.groups()}
        assert states["a"] == "discarded" and states["b"] in ("sealed", "packed", "trained") and len(states) == 2


async def test_marks_and_rollouts_survive_kills(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora") as (_, run):
        await run.wait(0, timeout=60)
        client = run.rollout("t7").openai(max_retries=8)
        answer = await client.chat.completions.create(model=run.model, **ASK)
        rig.until(lambda: rig.rows("SELECT delivery FROM exchange") == [("delivered",)], "its mark")
        rig.restart()
        again = await client.chat.completions.create(
            model=run.model, extra_headers={"x-stainless-retry-count": "1"}, **ASK
        )
        assert again.id != answer.id, "what was delivered is not given again"
        made = await run.submit("g", 1.0, rollout="t7")
        rig.restart()
        assert (await run.submit("g", 1.0, rollout="t7")).duplicate
        with pytest.raises(Conflict, match=f"is trajectory {made.trajectory} already"):
            await run.submit("g", 0.5, rollout="t7", key="another")
    assert rig.rows("SELECT count(*) FROM exchange WHERE trajectory_id = 1") == [(2,)]
    rig.check(1)


async def test_the_blocking_client_has_them_too(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    with SyncClient(rig.data) as art:
        run = art.run("r", model=rig.model, **(SPEC | {"rollout_weights_mode": "lora"}))
        run.wait(0, timeout=60)
        with run.group("a", n=2) as group:
            for index, rollout in enumerate(group):
                rollout.openai().chat.completions.create(model=run.model, **ASK)
                rollout.submit(float(index))
        with pytest.raises(ZeroDivisionError), run.group("b", n=1):
            raise ZeroDivisionError
        assert run.wait(1, timeout=60).step == 1
        assert run.rollout("x").headers == {"x-artd-rollout": "x", "x-session-id": "x"}
    rig.check(2)
