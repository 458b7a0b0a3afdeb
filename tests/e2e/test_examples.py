"""Examples and given advantages through the real trainer: the daemon, the packer and Megatron-Core; the engine is the scripted one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from artd_client import Client, Invalid, StepInfo, turn
from tests.awake import SOON_S
from tests.house import feed

from .rig import Rig, make_toy
from .test_package_wheel import rig as _rig

rig = _rig
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLES = [([5 + n, 9, 11], [20 + n, 21, 22, 23 + n]) for n in range(4)]


async def learn(data: Path, steps: int, **spec: Any) -> list[StepInfo]:
    """Train on the same four examples again and again; a rollout is refused."""
    async with Client(data_dir=data) as art:
        run = await art.run("r", **spec)
        with pytest.raises(Invalid, match="use run.submit_example"):
            await run.submit("g", 1.0, turns=[turn([1, 2], [3], [-0.5])])
        found = []
        for step in range(1, steps + 1):
            for number, (prompt, answer) in enumerate(EXAMPLES):
                await run.submit_example(prompt, answer, weights=[1, 1, 1, 0], key=f"{step}-{number}")
            found.append(await run.wait(step, timeout=SOON_S))
        return found


async def credit(data: Path, **spec: Any) -> StepInfo:
    """One step of a group of one whose program gives each token's advantage."""
    async with Client(data_dir=data) as art:
        run = await art.run("r", **spec)
        one = turn([1, 2, 3], [4, 5], [-0.5, -1.0])
        await run.submit("g", 0.0, turns=[one], advantages=[[1.0, -2.0]], weights=0.5)
        return await run.wait(1, timeout=SOON_S)


def fields(tmp_path: Path, **more: Any) -> dict[str, Any]:
    common = {name: value for name, value in feed.COMMON.items() if name not in ("group_size", "groups_per_step")}
    return common | feed.SPECS["dense"] | {"model": str(make_toy(tmp_path / "toy", "llama"))} | more


def test_a_run_of_examples_learns_them(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    steps = asyncio.run(learn(rig.data, 3, **fields(tmp_path, groups_per_step=4, loss={"kind": "sft"})))
    losses = [step.metrics["loss"] for step in steps]
    assert losses[0] > losses[1] > losses[2] > 0
    assert all(step.metrics["trained_tokens"] == 12 for step in steps)
    assert not any(name.startswith(("ratio_", "mismatch_", "kl_k3", "staleness")) for name in steps[0].metrics)


def test_a_program_gives_advantages(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    spec = fields(
        tmp_path,
        group_size=1,
        groups_per_step=1,
        advantages={"baseline": "given"},
        loss={"kind": "importance_sampling"},
    )
    step = asyncio.run(credit(rig.data, **spec))
    assert step.metrics["trained_tokens"] == 2 and step.metrics["grad_norm"] > 0
