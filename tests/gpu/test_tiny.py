"""The scripts of tools/gpu still run: on a CPU, with `--tiny`, as the README says they do; a GPU is lent too seldom to find that out on it.

Elsewhere: sharded (tests/trainer/test_sharded_megatron.py); what conformance runs (tests/conformance/test_real.py); parallel takes too long.
In the interpreters that they get on a GPU machine: vLLM's for the engine's side, the trainer's with what its tests need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from artd.runtimes import lockfile, registry

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(620)]
ROOT = Path(__file__).parents[2]
CODE = [str(ROOT / part) for part in ("workers", "schema", "client", "")]
DENSE = "table,in_place,staged,truth,stock_road,refusals"
ENGINE = [
    "push --layers 4 --rounds 3",
    *(f"push --layers 4 --family {family} --items {DENSE}" for family in ("qwen3", "qwen3_tied", "llama")),
    "wire --rounds 2",
    "stock --items yardstick,watchdog",
]
TRAINER = ["trainer", "full", "merge_loss", "ranks", "killed", "kernels"]
LOOP = ["--family llama", "--family qwen3_tied --parameters full --lr 1e-3"]


def lines(words: str, out: Path, python: str, path: list[str]) -> list[dict[str, object]]:
    """What a script has written, having ended with status 0."""
    name, *rest = words.split()
    asked = [python, "-m", f"tools.gpu.{name}", *rest, "--tiny", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*path, *CODE]), "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for file in out.glob("*.jsonl") for line in file.read_text().splitlines()]


@pytest.mark.parametrize("words", ENGINE)
def test_beside_vllm(words: str, tmp_path: Path) -> None:
    found = lines(words, tmp_path, str(registry.find("vllm").python), [])
    assert found and not [line for line in found if "failed" in line]


@pytest.mark.parametrize("words", TRAINER)
def test_beside_megatron(words: str, tmp_path: Path) -> None:
    overlay = registry.find(lockfile.OVERLAY)
    found = lines(words, tmp_path, str(overlay.python), overlay.site_paths)
    assert found and not [line for line in found if "failed" in line]


@pytest.mark.parametrize("words", LOOP)
def test_the_loop(words: str, tmp_path: Path) -> None:
    small = "--layers 2 --steps 2 --groups 2 --group 4 --prompt 8 --answer 16"
    found = lines(f"loop {words} {small}", tmp_path, sys.executable, [])
    (last,) = [line["answered_by"] for line in found if line["what"] == "answer after the last step"]
    assert last == ["run@2"]
    assert [line["what"] for line in found][-1] == "stopped"
