"""The whole loop with real parts: Megatron-Core trains, vLLM serves, SQLite keeps, in both weight modes, two steps each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from artd.supervise.guardian import all_stats, descendants
from artd_client import Client, Conflict, ExchangeRef, Failed, Invalid, NotFound, Run
from artd_schema.paths import read_daemon_file
from tests.e2e.rig import BIN, Rig, make_toy
from tests.listening import beyond_loopback, listening

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SPEC = {
    "group_size": 4,
    "groups_per_step": 2,
    "row_length": 256,
    "optimizer": {"lr": 1e-2},
    "engine": {"max_model_len": 128, "kv_cache_mib": 64, "max_num_seqs": 16},
}


async def ask(openai, model: str, prompt: str, seed: int, **options):
    messages = [{"role": "user", "content": prompt}]
    return await openai.chat.completions.create(
        model=model, messages=messages, n=4, max_tokens=12, temperature=1.0, seed=seed, **options
    )


async def one_step(run: Run, openai, step: int):
    """Two groups of four samples by reference; reward: how early the answer has an `a`."""
    for group in range(2):
        response = await ask(openai, run.model, f"tell me about {group}", step * 10 + group)
        assert response.model == f"{run.name}@{step - 1}", "rollouts come from the newest step that is served"
        for choice in response.choices:
            await run.submit(f"{step}-{group}", float(choice.index), responses=[(response.id, choice.index)])
    return await run.wait(step, timeout=300)


def greedy_options() -> dict:
    return {"n": 1, "max_tokens": 12, "temperature": 0.0, "logprobs": True}


async def probe(openai, model: str) -> list[float]:
    """Logprobs of a greedy answer: they change when the weights do."""
    messages = [{"role": "user", "content": "probe"}]
    response = await openai.chat.completions.create(model=model, messages=messages, **greedy_options())
    return [entry.logprob for entry in response.choices[0].logprobs.content]


@pytest.mark.parametrize(("mode", "family"), [("merged", "qwen3"), ("lora", "llama")])
@pytest.mark.asyncio
async def test_two_steps_are_trained_pushed_and_served(rig: Rig, tmp_path: Path, mode: str, family: str) -> None:
    model = make_toy(tmp_path / "toy", family)
    async with Client(data_dir=rig.data) as art:
        run = await art.run("toy", model=model, rollout_weights_mode=mode, **SPEC)
        await run.wait(0, timeout=600)
        openai = run.openai()
        base = await probe(openai, run.model)
        steps = [await one_step(run, openai, step) for step in (1, 2)]
        for step in steps:
            assert step.metrics["mismatch_tokens"] == 96
            assert step.metrics["mismatch_max"] <= 1e-5, "the trainer scores what the engine sampled"
        trained = await probe(openai, run.model)
        assert base != trained, "the served weights changed"
        pushes = await art.rows("pushes")
        assert [push["source"] for push in pushes] == (["live", "live", "disk"] if mode == "merged" else ["disk"] * 3)
        assert max(push["max_abs"] for push in pushes) <= 1e-5
        if mode == "lora":
            await check_pinned_steps(openai, base, trained)
        else:
            await check_only_newest(openai)
        await check_eval_and_errors(run, openai)
        await check_second_run_is_refused(art, model, mode)
    check_sockets(rig)
    check_export(rig, tmp_path)
    check_status(rig)
    rig.stop()
    assert not rig.processes()


async def check_pinned_steps(openai, base: list[float], trained: list[float]) -> None:
    assert await probe(openai, "toy@1") not in (base, trained)
    assert await probe(openai, "toy@2") == pytest.approx(trained, abs=1e-5)


async def check_only_newest(openai) -> None:
    from openai import NotFoundError

    with pytest.raises(NotFoundError, match="toy@2"):
        await probe(openai, "toy@1")


async def check_eval_and_errors(run: Run, openai) -> None:
    """Evaluation is kept apart, and what was used once cannot be used again."""
    response = await ask(openai, run.model, "held out", 99, extra_headers={"x-artd-split": "eval"})
    with pytest.raises(Conflict, match="eval"):
        await run.submit("eval-as-train", 1.0, responses=[(response.id, 0)])
    kept = await run.submit("eval", 1.0, responses=[(response.id, 0)], split="eval")
    with pytest.raises(Conflict, match=str(kept.trajectory)):
        await run.submit("again", 0.5, responses=[(response.id, 0), (response.id, 1)], split="eval")
    with pytest.raises(NotFound, match="chatcmpl-none"):
        await run.submit("unknown", 1.0, responses=[ExchangeRef("chatcmpl-none", 0)])


async def check_second_run_is_refused(art: Client, model: Path, mode: str) -> None:
    with pytest.raises(Conflict, match="toy"):
        await art.run("other", model=model, **SPEC)
    with pytest.raises(Conflict, match="group_size"):
        await art.run("toy", model=model, rollout_weights_mode=mode, **(SPEC | {"group_size": 5}))
    with pytest.raises((Invalid, Failed), match="no model folder"):
        await art.run("missing", model=model / "nowhere", **SPEC)


def check_sockets(rig: Rig) -> None:
    """Daemon, gateway, Megatron-Core, vLLM and its EngineCore: none listens where another machine could reach it."""
    found = read_daemon_file(rig.data)
    assert found is not None
    pids = [found.pid, *(stat.pid for stat in descendants([found.pid], all_stats()))]
    assert len(pids) >= 8 and listening(pids), "the gateway at least"
    assert not beyond_loopback(pids)


def check_export(rig: Rig, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    subprocess.run([BIN / "artctl", "export", "toy@2", target, "--data-dir", rig.data], check=True, timeout=300)
    ours = (rig.checkpoint("toy", 2) / "adapter_model.safetensors").read_bytes()
    assert (target / "adapter_model.safetensors").read_bytes() == ours
    assert json.loads((target / "adapter_config.json").read_text())["r"] == 16


@pytest.mark.slow
@pytest.mark.asyncio
async def test_after_every_kill_9_nothing_lives_and_the_same_step_is_served_from_disk(rig: Rig, tmp_path: Path) -> None:
    """Daemon and harness together; the daemon while the harness is stopped; the daemon alone."""
    model = make_toy(tmp_path / "toy", "qwen3")
    async with Client(data_dir=rig.data) as art:
        run = await art.run("toy", model=model, **SPEC)
        await run.wait(0, timeout=600)
        await one_step(run, run.openai(), 1)
        trained = await probe(run.openai(), run.model)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        assert any("EngineCore" in line for line in rig.processes())
        os.kill(rig.harness, number)
        rig.kill()
        rig.start()
        async with Client(data_dir=rig.data) as art:
            run = await art.run("toy")
            await run.wait(1, timeout=300)
            assert await probe(run.openai(), run.model) == pytest.approx(trained, abs=1e-5)
            newest = (await art.rows("pushes"))[0]
            assert (newest["source"], newest["step"], newest["state"]) == ("disk", 1, "live")
    rig.kill()


def check_status(rig: Rig) -> None:
    status = rig.status()
    assert status["schema"] == "artctl.status/1"
