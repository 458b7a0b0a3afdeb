"""A step is its bytes: four steps straight, and two, a kill -9 of daemon and trainer, and two more, end in the same files.

The trainer is the real one in a process of its own; the engine is scripted, for what is trained is submitted by value.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from artd_client import Client, Run, turn
from tests.e2e.rig import Rig, make_toy
from tests.fakes.interpreter import engine_config

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
FILES = ("adapter_model.safetensors", "optimizer.safetensors", "state.json")


async def submit_step(run: Run, step: int) -> None:
    """The same trajectories in every run of this test."""
    numbers = random.Random(step)
    for group in range(2):
        prompt = [numbers.randrange(5, 1000) for _ in range(8)]
        for sample in range(4):
            ids = [numbers.randrange(5, 1000) for _ in range(6)]
            logprobs = [-numbers.uniform(1, 8) for _ in ids]
            await run.submit(f"{step}-{group}", float(sample), turns=[turn(prompt, ids, logprobs)])


async def train(rig: Rig, model: Path, steps: range) -> None:
    async with Client(data_dir=rig.data) as art:
        run = await art.run(
            "toy", model=model, group_size=4, groups_per_step=2, optimizer={"lr": 1e-2}, threads=1,
            keep_checkpoints=9,
        )  # fmt: skip
        await run.wait(steps.start - 1, timeout=300)
        for step in steps:
            await submit_step(run, step)
            await run.wait(step, timeout=300)


@pytest.mark.asyncio
async def test_two_and_two_steps_are_four(tmp_path: Path) -> None:
    model = make_toy(tmp_path / "toy", "llama")
    straight, broken = (Rig(tmp_path / name, engine_config(tmp_path / name)) for name in ("straight", "broken"))
    try:
        straight.start()
        await train(straight, model, range(1, 5))
        straight.stop()
        broken.start()
        await train(broken, model, range(1, 3))
        broken.kill()
        broken.start()
        await train(broken, model, range(3, 5))
    finally:
        straight.stop()
        broken.stop()
    for step in range(5):
        for name in FILES:
            ours, theirs = (rig.checkpoint("toy", step) / name for rig in (straight, broken))
            assert ours.read_bytes() == theirs.read_bytes(), f"step {step}: {name} differs"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_step_after_a_rollback_is_the_step_without_it(tmp_path: Path) -> None:
    """A third step on other data, back to step 2, and the right third step: the bytes of a run that never went wrong."""
    model = make_toy(tmp_path / "toy", "llama")
    straight, strayed = (Rig(tmp_path / name, engine_config(tmp_path / name)) for name in ("straight", "strayed"))
    try:
        straight.start()
        await train(straight, model, range(1, 4))
        straight.stop()
        strayed.start()
        await train(strayed, model, range(1, 3))
        async with Client(data_dir=strayed.data) as art:
            run = await art.run("toy")
            await submit_step(run, 9)
            await run.wait(3, timeout=300)
            left = (strayed.checkpoint("toy", 3) / FILES[0]).read_bytes()
            await run.rollback(2)
            await submit_step(run, 3)
            await run.wait(3, timeout=300)
            assert run.info.lineage == 1
    finally:
        straight.stop()
        strayed.stop()
    (ours,) = (strayed.data / "checkpoints" / "toy").glob("l1-s000003-*")
    for name in FILES:
        wanted = (straight.checkpoint("toy", 3) / name).read_bytes()
        assert (ours / name).read_bytes() == wanted, f"{name} differs"
    assert left != (ours / FILES[0]).read_bytes()
