"""A mixture of experts with real parts: routes go from vLLM's gates to Megatron's router, and every weight is trained."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from artd_client import Client, Invalid, Run
from artd_schema.data.manifest import ReplayManifest
from tests.e2e.rig import BIN, Rig, make_toy

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SPEC = {
    "parameters": "full",
    "group_size": 4,
    "groups_per_step": 2,
    "row_length": 256,
    "optimizer": {"lr": 1e-3},
    "engine": {"max_model_len": 128, "kv_cache_mib": 64, "max_num_seqs": 16},
}
EXACT = 1e-5  # nats, fp32


async def one_step(run: Run, step: int):
    """Two groups of four samples by reference; reward: the number of the choice."""
    for group in range(2):
        response = await run.openai().completions.create(
            model=run.model,
            prompt=f"tell me about {group}",
            n=4,
            max_tokens=12,
            temperature=1.0,
            seed=step * 10 + group,
        )
        for choice in response.choices:
            await run.submit(f"{step}-{group}", float(choice.index), responses=[(response.id, choice.index)])
    return await run.wait(step, timeout=300)


@pytest.mark.asyncio
async def test_every_weight_is_trained_through_the_experts_that_the_engine_chose(rig: Rig, tmp_path: Path) -> None:
    model = make_toy(tmp_path / "toy", "qwen3_moe")
    async with Client(data_dir=rig.data) as art:
        with pytest.raises(Invalid, match="full"):
            await art.run("adapter", model=model, rollout_weights_mode="lora", **SPEC)
        run = await art.run("moe", model=model, **SPEC)
        await run.wait(0, timeout=600)
        steps = [await one_step(run, step) for step in (1, 2)]
        for step in steps:
            assert step.metrics["mismatch_tokens"] == 96
            assert step.metrics["mismatch_max"] <= EXACT, "the trainer scores what the engine sampled, experts included"
        pushes = await art.rows("pushes")
        assert [push["source"] for push in pushes] == ["live", "live", "disk"]
        assert max(push["max_abs"] for push in pushes) <= EXACT
    for number in (1, 2):
        check_bundle(rig, number)
    check_replay(rig, step=2)
    rig.stop()
    assert not rig.processes()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_adapters_of_experts_are_what_the_engine_holds_in_bf16(rig: Rig, tmp_path: Path) -> None:
    """By the trainer's own sums of what vLLM must make of them; each push is live, whatever rounding does to the scores."""
    model = make_toy(tmp_path / "toy", "qwen3_moe")
    changes = {"parameters": "lora", "lora": {"rank": 4, "alpha": 6}, "engine": SPEC["engine"] | {"dtype": "bfloat16"}}
    async with Client(data_dir=rig.data) as art:
        run = await art.run("moe", model=model, rollout_weights_mode="lora", **SPEC | changes)
        await run.wait(0, timeout=600)
        for step in (1, 2):
            await one_step(run, step)
        pushes = await art.rows("pushes")
    assert [(push["mode"], push["attempts"], push["error"]) for push in pushes] == [("lora", 0, "")] * 3
    told = [
        line for line in (rig.data / "logs/engine-1-0.log").read_text().splitlines() if "the engine's change is" in line
    ]
    assert [line.split()[2] for line in told] == ["moe@0:", "moe@1:", "moe@2:"]
    for path in (rig.data / "checkpoints/moe").glob("*/weights.json"):
        table = json.loads(path.read_text())
        assert {row["dtype"] for row in table["held"]} == {"bfloat16"}
        assert len(table["held"]) == len(table["tensors"]) == 2 * (4 + 3 * 8) * 3
    rig.stop()
    assert not rig.processes()


def check_bundle(rig: Rig, step: int) -> None:
    """Every token but the last of each sequence came with the engine's routes, and the step's batch names the bundle."""
    manifests = [path.read_bytes() for path in rig.data.glob("blobs/*/*") if path.stat().st_size < 1 << 20]
    found = [json.loads(raw) for raw in manifests if raw.startswith(b'{"covered"')]
    (bundle,) = [entry for entry in found if entry["step"] == step]
    assert set(bundle) <= {*ReplayManifest.__struct_fields__}
    assert bundle["tokens"] - bundle["covered"] == 8, "one last token for each of the eight sequences"


def check_replay(rig: Rig, step: int) -> None:
    """The train job of a step, run again from its manifest, gives the same bits."""
    jobs = json.loads(run_tool("artctl", rig, "jobs", "--json").stdout)["jobs"]
    (job,) = [row["id"] for row in jobs if row["kind"] == "train" and row["step"] == step]
    done = run_tool("artd", rig, "replay-job", str(job))
    assert done.returncode == 0, done.stdout + done.stderr


def run_tool(tool: str, rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    command = [BIN / tool, *words, "--data-dir", rig.data]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
