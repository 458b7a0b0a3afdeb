"""Rollouts by reference: the real gateway and its ledger between a client and a scripted OpenAI server; routed experts."""

from __future__ import annotations

import msgspec
import pytest

from artd_client import Conflict, Invalid, turn
from artd_schema.data.trajectory import RouteShape, Turn
from tests.daemon.rig import VOCAB, Rig
from tests.fakes.routes import rows_of

pytestmark = pytest.mark.asyncio


async def ask(openai, run, **more):
    messages = [{"role": "user", "content": "Capital?"}]
    return await openai.chat.completions.create(model=run.model, messages=messages, max_tokens=8, **more)


async def test_chat_then_submit_by_reference_then_train(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora") as (_, run):
        await run.wait(0, timeout=60)
        openai = run.openai()
        answers = [await ask(openai, run) for _ in range(2)]
        for number, answer in enumerate(answers):
            assert answer.choices[0].message.content.startswith("Paris")
            await run.submit("g", float(number), responses=[answer])
        with pytest.raises(Conflict, match="part of trajectory"):
            await run.submit("h", 1.0, responses=[answers[0]], key="another")
        assert (await run.wait(1, timeout=60)).step == 1
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
        await run.wait(0, timeout=60)
        answer = await ask(run.openai(), run)
        rig.restart()
        submitted = await run.submit("g", 1.0, responses=[answer])
        assert (await run.submit("g", 1.0, responses=[answer])).duplicate
        assert submitted.trajectory == 1
    rig.check(1)


async def test_an_openai_client_goes_on_over_a_restart_at_the_same_address(rig: Rig):
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora") as (_, run):
        await run.wait(0, timeout=60)
        openai, address = run.openai(max_retries=8), run.base_url
        await ask(openai, run)
        rig.restart()
        assert (await ask(openai, run)).choices
        await run.refresh()
        assert run.base_url == address


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB, "num_hidden_layers": 3, "mlp_only_layers": [1],
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
SHAPE = RouteShape(layers=2, topk=2, experts=8)


def turns_of(rig: Rig, trajectory: int) -> list[Turn]:
    ((body,),) = rig.rows("SELECT body FROM trajectory_data WHERE trajectory_id = ?", trajectory)
    return msgspec.msgpack.decode(body, type=list[Turn])


async def complete(openai, run, prompt: str):
    return await openai.completions.create(model=run.model, prompt=prompt, max_tokens=8)


async def test_routed_experts_come_from_the_engine_to_the_row_each_tokens_once(rig: Rig):
    rig.configure(MOE)
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora") as (_, run):
        await run.wait(0, timeout=60)
        openai = run.openai()
        first = await complete(openai, run, "Hi")
        second = await complete(openai, run, "HiParis$ and")
        made = await run.submit("g", 0.0, responses=[first, second])
        turns = turns_of(rig, made.trajectory)
        assert [t.routes for t in turns] == [rows_of(SHAPE, 0, 7), rows_of(SHAPE, 7, 10)]
        assert [t.routes_start for t in turns] == [0, 7]

        value = {"prompt_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-1.0, -1.0]}
        with pytest.raises(Invalid, match="no routes for this token"):
            await run.submit("g", 1.0, turns=[turn(**value)])
        with pytest.raises(Invalid, match="expert id 8, but there are 8"):
            await run.submit("g", 1.0, turns=[turn(**value, routes=b"\x08\x01\x02\x03" * 3)])
        ids = [[[7, 1], [0, 2]]] * 3
        made = await run.submit("g", 1.0, turns=[turn(**value, routes=ids, experts=8)])
        assert turns_of(rig, made.trajectory)[0].routes == b"\x07\x01\x00\x02" * 3
        assert (await run.wait(1, timeout=60)).step == 1
    rig.check(2)


async def test_with_expert_replay_off_no_routes_are_asked_for_or_taken(rig: Rig):
    rig.configure(MOE)
    rig.script.write(http=1)
    rig.start()
    async with rig.run(rollout_weights_mode="lora", expert_replay=False) as (_, run):
        await run.wait(0, timeout=60)
        made = await run.submit("g", 0.0, responses=[await complete(run.openai(), run, "Hi")])
        assert turns_of(rig, made.trajectory)[0].routes == b""
        with pytest.raises(Invalid, match="expert_replay=false"):
            await run.submit("g", 1.0, turns=[turn([1], [2, 3], [-1.0, -1.0], routes=b"\x00\x01\x02\x03" * 2)])
    rig.check(1)
