"""Base models that are drawn: the same numbers for all who ask, whole folders, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from artd_schema.run.families import SEEDED
from artd_schema.run.spec import RunSpec
from artd_workers.models import seeded
from artd_workers.models.seeded import Draw, SeededWeights, draw_matrix, make
from artd_workers.trainer.parameters.trained import open_model
from artd_workers.transfer.merge import BaseWeights, open_base
from tools.gpu import shape

CPU = torch.device("cpu")


def numbers(name: str, count: int, seed: int, std: float) -> list[float]:
    """The same by Python's integers."""
    import hashlib

    key = int.from_bytes(hashlib.sha256(f"1 {seed} {name}".encode()).digest()[:8], "little")
    out, mask = [], (1 << 64) - 1
    for index in range(count):
        x = (index * 0x9E3779B97F4A7C15 + key) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        x ^= x >> 31
        out.append(((x & 0xFFFFFF) - (2**24 - 1) / 2) * (std * math.sqrt(3) / 2**23))
    return out


def test_a_weight_is_its_hash_in_bf16():
    found = draw_matrix("a.weight", (5, 7), Draw(3, 0.02), CPU)
    wanted = torch.tensor(numbers("a.weight", 35, 3, 0.02), dtype=torch.float64)
    assert found.dtype == torch.bfloat16
    assert (found.double().flatten() - wanted).abs().max() <= 0.02 * math.sqrt(3) / 256  # half a unit of bf16


def test_chunks_do_not_show(monkeypatch):
    whole = draw_matrix("a.weight", (40, 9), Draw(0, 0.02), CPU)
    monkeypatch.setattr(seeded, "_CHUNK", 7)
    assert torch.equal(draw_matrix("a.weight", (40, 9), Draw(0, 0.02), CPU), whole)


def test_seed_and_name_change_every_weight():
    one = draw_matrix("a.weight", (64, 64), Draw(0, 0.02), CPU).float()
    for other in (
        draw_matrix("b.weight", (64, 64), Draw(0, 0.02), CPU),
        draw_matrix("a.weight", (64, 64), Draw(1, 0.02), CPU),
    ):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.float().flatten())))[0, 1]) < 0.06
    assert one.mean().abs() < 0.002 and abs(one.std() - 0.02) < 0.001


def test_a_folder_trains_as_its_weights_on_disk(tmp_path):
    drawn_folder = make(tmp_path / "drawn", shape.config(1, tiny=True), seed=5, std=0.3)
    base = open_base(drawn_folder)
    assert isinstance(base, SeededWeights)
    stored = tmp_path / "stored"
    stored.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (stored / name).write_bytes((drawn_folder / name).read_bytes())
    save_file(dict(base), stored / "model.safetensors", metadata={"format": "pt"})
    assert isinstance(open_base(stored), BaseWeights) and list(open_base(stored)) == list(base)
    scores = []
    for folder in (drawn_folder, stored):
        policy, trained = open_model(RunSpec(model=str(folder)))
        trained.initialise(0)
        scores.append(policy.score_sequence(torch.arange(20) + 7))
    assert torch.equal(*scores)
    assert make(drawn_folder, {"architectures": ["Qwen3MoeForCausalLM"]} | shape.config(1, tiny=True)) == drawn_folder


def test_another_version_is_refused(tmp_path):
    folder = make(tmp_path / "drawn", shape.config(1, tiny=True))
    (folder / SEEDED).write_text(json.dumps({"version": 2, "seed": 0, "std": 1.0}))
    with pytest.raises(ValueError, match="of version 2, and this artd draws version 1"):
        open_base(folder)
