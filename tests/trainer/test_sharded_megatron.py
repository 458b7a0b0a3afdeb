"""artd's sharded optimizer against Megatron's own, on the same model and batches: `tests.gpu.sharded --items megatron` on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]
CASES = ("bfloat16", "float32", "float32, clipped")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The script's lines by what they tell, of each case the three ways and how far they are apart."""
    out = tmp_path_factory.mktemp("megatron")
    asked = [sys.executable, "-m", "tests.gpu.sharded", "--items", "megatron", "--tiny", "--out", str(out)]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(asked, cwd=ROOT, env=os.environ | environment, timeout=560, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (out / "sharded.jsonl").read_text().splitlines()]
    return {f"{line['what']}, {line['way']}" if "way" in line else line["what"]: line for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_megatron_s_distributed_optimizer_gives_the_same(said: dict[str, dict[str, Any]], case: str) -> None:
    """Losses, masters and moments to the bit, but for its own way to clip, which is to limit / (norm + 1e-6); its norm is in fp32."""
    found = said[f"Megatron's against artd's in {case}"]
    off, norm = found["off"], min(said[f"2 processes in {case}, artd"]["grad_norm"])
    clipped = 1e-6 / norm if "clipped" in case else 0.0
    assert found["within"] and 0 < off["grad_norm"] <= 1e-6
    assert off["exp_avg"] <= 1.1 * clipped and off["exp_avg_sq"] <= 2.2 * clipped
    assert off["loss"] <= clipped and off["master"] <= 0.1 * clipped
    assert not any(found["artd_again"].values())


@pytest.mark.parametrize("case", CASES)
def test_the_comparison_says_something(said: dict[str, dict[str, Any]], case: str) -> None:
    """Three steps that move the loss, all elements on either side, half on each rank, and equal weights on both."""
    ours, theirs = (said[f"2 processes in {case}, {way}"] for way in ("artd", "megatron"))
    assert all(abs(a - b) > 1e-3 for a, b in zip(ours["loss"], ours["loss"][1:], strict=False))
    assert all(norm > 0.5 for norm in ours["grad_norm"]) and len(ours["grad_norm"]) == 3
    assert sum(ours["elements"]) == sum(theirs["elements"]) > 2e5
    assert max(ours["elements"]) <= 0.51 * sum(ours["elements"])
    assert ours["weights_equal"] and theirs["weights_equal"]


def test_only_megatron_keeps_gradients_between_steps(said: dict[str, dict[str, Any]]) -> None:
    """fp32 and of every element, on each rank."""
    ours, theirs = (said[f"2 processes in bfloat16, {way}"] for way in ("artd", "megatron"))
    assert ours["kept_gradients"] == [0, 0]
    assert all(kept >= 4 * sum(theirs["elements"]) for kept in theirs["kept_gradients"])
