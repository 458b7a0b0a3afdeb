"""Rollouts by reference: the real gateway and its ledger between a client and a scripted OpenAI server."""

from __future__ import annotations

import pytest

from artd_client import Conflict
from tests.daemon.rig import Rig

pytestmark = pytest.mark.asyncio


async def ask(openai, run, **more):
    messages = [{"role": "user", "content": "Capital?"}]
    return await openai.chat.completions.create(model=run.model, messages=messages, max_tokens=8, **more)


async def test_chat_then_submit_by_reference_then_train(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora") as (_, run):
        await run.wait(0, timeout=20)
        openai = run.openai()
        answers = [await ask(openai, run) for _ in range(2)]
        for number, answer in enumerate(answers):
            assert answer.choices[0].message.content.startswith("Paris")
            await run.submit("g", float(number), responses=[answer])
        with pytest.raises(Conflict, match="part of trajectory"):
            await run.submit("h", 1.0, responses=[answers[0]], key="another")
        assert (await run.wait(1, timeout=20)).step == 1
        rows = await run.trajectories()
        assert {(row["state"], row["epoch_min"], row["epoch_max"]) for row in rows} == {("trained", 0, 0)}
        later = await ask(openai, run)
        await run.submit("g2", 0.0, responses=[later])
        assert (await run.trajectories())[0]["epoch_max"] == 1
    rig.check(3)


async def test_what_the_ledger_took_survives_a_kill(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora") as (_, run):
        await run.wait(0, timeout=20)
        answer = await ask(run.openai(), run)
        rig.restart()
        submitted = await run.submit("g", 1.0, responses=[answer])
        assert (await run.submit("g", 1.0, responses=[answer])).duplicate
        assert submitted.trajectory == 1
    rig.check(1)
