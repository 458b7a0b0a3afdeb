"""Expert replay in a model that is spread over two processes: the same routes give one process's losses and gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from artd_workers.trainer.lora import Lora, shapes_of
from artd_workers.trainer.model import Policy
from artd_workers.trainer.parallel import Parallel, padded

from . import moe_rig
from .moe_rig import FOREIGN, ROWS, SHAPE

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
LAYOUTS = {"tensor": {"tp": 2, "sp": True}, "expert": {"ep": 2}}
TRAINED = {"tensor": [0, 1, 2], "expert": [0, 1]}
"""Rows of a step: all on each tensor-parallel rank, one on each expert-parallel one."""


def one_process(rows: list[int]) -> dict:
    policy = moe_rig.policy()
    policy.model.train()
    losses, total = [], {}
    for row in rows:
        value, found = moe_rig.trained(policy, row, FOREIGN[row])
        losses.append(value)
        total = {name: total.get(name, 0) + gradient for name, gradient in found.items()}
    return {"losses": torch.stack(losses), "gradients": total}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank found, for each layout."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save({name: one_process(rows) for name, rows in TRAINED.items()}, folder / "reference.pt")
    job = {"store": str(folder / "store"), "reference": str(folder / "reference.pt"), "layouts": LAYOUTS}
    alone = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.parallel_child", json.dumps(job | {"rank": rank})],
            cwd=ROOT,
            env=os.environ | alone,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error for _, error in said)
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_equal_one(reports: list[dict], layout: str) -> None:
    for report in reports:
        assert report[layout]["loss"] < 1e-5 and report[layout]["gradient"] < 1e-5
        assert report[layout]["calls"] == SHAPE.layers * len(TRAINED[layout]) / (2 if layout == "expert" else 1)


def test_sizes_that_the_process_groups_lack_are_refused() -> None:
    moe_rig.policy()
    with pytest.raises(ValueError, match=r"tp=2.* the process groups are of tp=1, ep=1"):
        moe_rig.policy(Parallel(tp=2, sp=True))


def test_adapters_on_a_split_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = moe_rig.policy()
    lora = Lora(policy.plan.codec, shapes_of(policy.plan.codec, moe_rig.weights()), 2, 4)
    Policy(policy.plan, policy.model, lora)
    monkeypatch.setattr(policy.model.config, "expert_model_parallel_size", 2)
    with pytest.raises(ValueError, match="adapters are not split"):
        Policy(policy.plan, policy.model, lora)


def test_padding_sees_itself_and_is_not_seen() -> None:
    row = ROWS[2]
    size = len(row.tokens)
    tokens, positions, hidden_from = padded(row.tokens, row.positions, row.hidden_from, 4)
    assert len(tokens) == len(positions) == len(hidden_from) == 12 and size == 11
    assert torch.equal(tokens[:size], row.tokens) and torch.equal(hidden_from[:size, :size], row.hidden_from)
    assert hidden_from[:size, size:].all() and hidden_from[size:].sum() == 11 and not hidden_from[11, 11]
    assert padded(row.tokens, row.positions, row.hidden_from, 1)[0] is row.tokens
