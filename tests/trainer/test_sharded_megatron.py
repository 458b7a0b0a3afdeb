"""artd's sharded optimizer against Megatron's own, on the same model and batches: `tools.gpu.sharded --items megatron,nudged` on a CPU."""

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
CASES = (
    "megatron: bfloat16", "megatron: float32", "megatron: float32, clipped", "nudged: bfloat16", "nudged: float32"
)  # fmt: skip
"""Item and case: by two processes, and by one."""
Said = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The script's lines: of each case the five ways by name, how far Megatron's is off (`verdict`), and how far it would be with
    another weight decay (`control`)."""
    out = tmp_path_factory.mktemp("megatron")
    asked = [sys.executable, "-m", "tools.gpu.sharded", "--items", "megatron,nudged", "--tiny", "--out", str(out)]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(asked, cwd=ROOT, env=os.environ | environment, timeout=560, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Said = {}
    for line in map(json.loads, (out / "sharded.jsonl").read_text().splitlines()):
        key = line.get("way", "verdict" if "within" in line else "control")
        found.setdefault(f"{line['item']}: {line['what'].rpartition(' in ')[2]}", {})[key] = line
    return found


@pytest.mark.parametrize("case", CASES)
def test_megatron_s_distributed_optimizer_gives_the_same(said: Said, case: str) -> None:
    """Losses, masters and moments to the bit, but for its own way to clip, which is to limit / (norm + 1e-6); its norm is in fp32."""
    found, norm = said[case]["verdict"], min(said[case]["artd"]["grad_norm"])
    clipped = 1e-6 / norm if "clipped" in case else 0.0
    assert found["within"] and found["elements_equal"]
    for off in found["off"].values():
        assert 0 < off["grad_norm"] <= 1e-6
        assert off["exp_avg"] <= 1.1 * clipped and off["exp_avg_sq"] <= 2.2 * clipped
        assert off["loss"] <= clipped and off["master"] <= 0.1 * clipped


@pytest.mark.parametrize("case", CASES)
def test_another_weight_decay_would_be_seen(said: Said, case: str) -> None:
    found = said[case]["control"]
    assert found["caught"] and found["off"]["first"]["master"] > 5e-6


@pytest.mark.parametrize("case", CASES)
def test_a_nudge_is_one_rounding_after_the_first_step_and_nothing_before(said: Said, case: str) -> None:
    """And artd's way gives the same bits each time until there."""
    ours, *nudged = (said[case][way] for way in ("artd", "artd, nudged 1", "artd, nudged 2"))
    for one in nudged:
        assert (one["loss"][0], one["grad_norm"][0]) == (ours["loss"][0], ours["grad_norm"][0])
        assert 2**-24 < one["first"]["master"] < 2**-23
        assert one["first"]["exp_avg"] == one["first"]["exp_avg_sq"] == 0 and one["weights_equal"]
        assert one["last"]["exp_avg"] > 1e-7
    assert nudged[0]["loss"] != nudged[1]["loss"]


@pytest.mark.parametrize("case", CASES)
def test_the_comparison_says_something(said: Said, case: str) -> None:
    """Three steps that move the loss, all elements on either side, shared out evenly, and equal weights on all ranks."""
    ours, theirs = (said[case][way] for way in ("artd", "megatron"))
    assert all(abs(a - b) > 1e-3 for a, b in zip(ours["loss"], ours["loss"][1:], strict=False))
    assert all(norm > 0.5 for norm in ours["grad_norm"]) and len(ours["grad_norm"]) == 3
    assert len(ours["elements"]) == (2 if case.startswith("megatron") else 1)
    assert sum(ours["elements"]) == sum(theirs["elements"]) > 2e5
    assert max(ours["elements"]) <= 1.02 / len(ours["elements"]) * sum(ours["elements"])
    assert ours["weights_equal"] and theirs["weights_equal"]


def test_only_megatron_keeps_gradients_between_steps(said: Said) -> None:
    """fp32 and of every element, on each rank."""
    ours, theirs = (said["megatron: bfloat16"][way] for way in ("artd", "megatron"))
    assert ours["kept_gradients"] == [0, 0]
    assert all(kept >= 4 * sum(theirs["elements"]) for kept in theirs["kept_gradients"])
