"""A loss and a model family from outside: a wheel that is built elsewhere and installed by pip, trained with by the real trainer, upgraded,
and replayed.

The daemon sees the package on its path; the engine is the scripted one, and rollouts come by value.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from artd_client import Client, Invalid, Run
from tests.awake import SOON_S
from tests.house import feed

from .rig import BIN, ROOT, Rig, make_toy

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
CODE = '''
from artd_workers.trainer.step.loss_api import LossInputs, LossOutput, Mean

from .inner import FACTOR


def gspo(inputs: LossInputs, *, clip: float = 0.2) -> LossOutput:
    """GSPO (arXiv:2507.18071, eq. 5)."""
    count = inputs.sequence_sum(inputs.mask.float()).clamp(min=1)
    ratio = (inputs.sequence_sum(inputs.logprobs - inputs.old_logprobs) / count).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    tokens = -FACTOR * (ratio * inputs.advantages).minimum(bounded * inputs.advantages)
    return LossOutput(tokens, {"clip": Mean(count.sum() * clip, count.sum()), "sequence_tokens": Mean.of(count)})
'''
FAMILY = '''
from artd_workers.models.base import HfConfig, Plan, attention, decoder_plan, dense_layers


def plan(config: HfConfig) -> Plan:
    """As Llama."""
    return decoder_plan("toy", config, dense_layers(config, attention(qk_norm=False)))
'''
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "toy-gspo"
version = "{version}"

[project.entry-points."artd.losses"]
toy = "toy_gspo:gspo"

[project.entry-points."artd.models"]
ToyForCausalLM = "toy_gspo.family:plan"

[tool.setuptools]
packages = ["toy_gspo"]
"""


def install(work: Path, site: Path, version: str, factor: float) -> None:
    """Build the wheel of a version, and install it: offline, and not with artd."""
    package = work / version / "toy_gspo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CODE)
    (package / "inner.py").write_text(f"FACTOR = {factor}\n")
    (package / "family.py").write_text(FAMILY)
    (package.parent / "pyproject.toml").write_text(PROJECT.format(version=version))
    pip, built = [sys.executable, "-m", "pip", "-q"], work / f"dist-{version}"
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", built, package.parent], check=True)
    shutil.rmtree(site, ignore_errors=True)
    subprocess.run([*pip, "install", *offline, "--target", site, *built.glob("*.whl")], check=True)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    engine = tmp_path / "engine-python"
    fake = ROOT / "tests" / "fakes" / "engine.py"
    engine.write_text(f'#!/bin/sh\nARTD_FAKE_SCRIPT="{tmp_path}/script.json" exec "{sys.executable}" "{fake}"\n')
    engine.chmod(0o755)
    config = f'[runtimes.engine]\npython = "{engine}"\npythonpath = ["{ROOT}"]\n'
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    made = Rig(tmp_path / "data", config)
    yield made
    made.stop()


async def train(data: Path, step: int, name: str = "r", **spec: Any) -> None:
    async with Client(data_dir=data) as art:
        run: Run = await art.run(name, **spec)
        await feed.submit(run, "dense", step, range(feed.GROUPS * feed.SAMPLES))
        await run.wait(step, timeout=SOON_S)


async def finish(data: Path) -> None:
    async with Client(data_dir=data) as art:
        await (await art.run("r")).finish()


async def refuse(data: Path, **spec: Any) -> str:
    async with Client(data_dir=data) as art:
        with pytest.raises(Invalid) as error:
            await art.run("r", **spec)
        return str(error.value)


def manifest(rig: Rig, step: int, run: str = "r") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((rig.checkpoint(run, step) / "manifest.json").read_bytes())
    return found


def replay(rig: Rig, job: int) -> subprocess.CompletedProcess[str]:
    command = [BIN / "artd", "replay-job", str(job), "--data-dir", rig.data, "--config", rig.config]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=SOON_S, env=os.environ)


def test_a_wheel_brings_a_loss(rig: Rig, tmp_path: Path) -> None:
    site = tmp_path / "site"
    spec = feed.COMMON | feed.SPECS["dense"] | {"model": str(make_toy(tmp_path / "toy", "llama"))}
    install(tmp_path, site, "1.0", 1.0)
    rig.start()
    said = asyncio.run(refuse(rig.data, **spec, loss={"kind": "none"}))
    assert "loss.kind='none'" in said and "toy (toy-gspo 1.0)" in said
    asyncio.run(train(rig.data, 1, **spec, loss={"kind": "toy", "params": {"clip": 0.25}}))
    first = manifest(rig, 1)
    assert first["metrics"]["clip"] == 0.25 and first["metrics"]["sequence_tokens"] == feed.ANSWER
    assert first["loss"] | {"digest": ""} == {
        "kind": "toy", "target": "toy_gspo:gspo", "distribution": "toy-gspo", "version": "1.0", "digest": "",
    }  # fmt: skip

    rig.stop()
    install(tmp_path, site, "2.0", -1.0)
    rig.start()
    asyncio.run(train(rig.data, 2))
    told = subprocess.run(
        [BIN / "artctl", "events", "--json", "--data-dir", rig.data], capture_output=True, text=True, check=True
    )
    assert '"run.code"' in told.stdout and "toy-gspo 2.0" in told.stdout
    second = manifest(rig, 2)
    assert second["loss"]["version"] == "2.0" and second["loss"]["digest"] != first["loss"]["digest"]

    copied = {path.name for path in (rig.data / "code").iterdir()}
    assert {first["loss"]["digest"], second["loss"]["digest"]} <= copied
    jobs = {step: manifest(rig, step)["job"] for step in (1, 2)}
    for job in jobs.values():
        done = replay(rig, job)
        assert done.returncode == 0 and "is bit for bit the committed one" in done.stdout, done.stdout + done.stderr
    copy = rig.data / "code" / first["loss"]["digest"]
    (copy / "toy_gspo" / "inner.py").write_text("FACTOR = 1.0  # the same, and not what was trained with\n")
    done = replay(rig, jobs[1])
    assert done.returncode == 1 and f"{copy} is damaged" in done.stderr, done.stderr
    shutil.rmtree(copy)
    done = replay(rig, jobs[1])
    assert done.returncode == 5 and "pip install toy-gspo==1.0" in done.stderr, done.stderr


def test_a_wheel_brings_a_model_family(rig: Rig, tmp_path: Path) -> None:
    llama = make_toy(tmp_path / "llama", "llama")
    model = shutil.copytree(llama, tmp_path / "toy")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["ToyForCausalLM"]}))
    spec = feed.COMMON | feed.SPECS["dense"]
    rig.start()
    said = asyncio.run(refuse(rig.data, **spec, model=str(model)))
    assert "architecture ToyForCausalLM" in said and "group 'artd.models'" in said
    asyncio.run(train(rig.data, 1, **spec, model=str(llama)))
    asyncio.run(finish(rig.data))

    rig.stop()
    install(tmp_path, tmp_path / "site", "1.0", 1.0)
    rig.start()
    asyncio.run(train(rig.data, 1, "toy", **spec, model=str(model)))
    own, toy = manifest(rig, 1), manifest(rig, 1, "toy")
    assert "family" not in own and "loss" not in toy
    assert toy["family"] | {"digest": ""} == {
        "kind": "ToyForCausalLM", "target": "toy_gspo.family:plan", "distribution": "toy-gspo", "version": "1.0", "digest": "",
    }  # fmt: skip
    weights = [{entry["name"]: entry["sha256"] for entry in found["files"]} for found in (own, toy)]
    assert weights[0]["adapter_model.safetensors"] == weights[1]["adapter_model.safetensors"]
    shutil.rmtree(tmp_path / "site")
    done = replay(rig, toy["job"])
    assert done.returncode == 0 and "is bit for bit the committed one" in done.stdout, done.stdout + done.stderr
