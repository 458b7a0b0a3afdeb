"""The adapter's start and its file form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from artd_workers.trainer.model.lora import adapter_config
from tests import toys

from . import rig

pytestmark = pytest.mark.torch


def test_initial_adapter(toy_folders: dict[str, Path]) -> None:
    """A is uniform in +-1/sqrt(in), the same for the same seed and name, different otherwise; B is zero."""
    folder = toy_folders["llama"]
    first, again, other = (rig.make_policy(folder, seed, random_b=False).lora.state() for seed in (5, 5, 6))
    assert len(first) == 2 * 7 * toys.LAYERS
    seen = set()
    for name, tensor in first.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, again[name])
        if ".lora_B." in name:
            assert tensor.shape[1] == rig.RANK and not tensor.any()
            continue
        bound = 1 / math.sqrt(tensor.shape[1])
        assert tensor.shape[0] == rig.RANK and 0.9 * bound < tensor.abs().max() <= bound
        assert abs(float(tensor.std()) - bound / math.sqrt(3)) < 0.1 * bound
        assert not torch.equal(tensor, other[name])
        seen.add(tensor.flatten()[:4].numpy().tobytes())
    assert len(seen) == 7 * toys.LAYERS, "two matrices start alike"


def test_names_and_targets(toy_folders: dict[str, Path]) -> None:
    policy = rig.make_policy(toy_folders["qwen3"])
    names = list(policy.lora.state())
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert names[1] == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    config = adapter_config("base", policy.plan.codec, rig.RANK, rig.ALPHA)
    wanted = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == wanted and (config["r"], config["lora_alpha"]) == (rig.RANK, rig.ALPHA)


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_load_refuses_another_adapter(toy_folders: dict[str, Path], change: str) -> None:
    lora = rig.make_policy(toy_folders["llama"]).lora
    state = {name: tensor.clone() for name, tensor in lora.state().items()}
    name = next(iter(state))
    if change == "missing":
        del state[name]
    else:
        state[name] = state[name][:1] if change == "shape" else state[name].double()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.lora_A"):
        lora.load(state)
