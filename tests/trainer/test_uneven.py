"""A base model with tensors that have no 64-bit checksum offers no direct push, before any model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from artd_schema.run.spec import EngineSpec, RunSpec
from artd_workers.models.seeded import SeededWeights, make
from artd_workers.trainer.push import serving
from artd_workers.transfer.merge import BaseWeights, open_base
from tests import toys
from tests.direct_rig import MemoryPort

from .test_experts import fused_copy

pytestmark = pytest.mark.torch


def drawn(folder: Path, family: str, **changes: Any) -> Path:
    return make(folder / "base", toys.config(family, **changes))


@pytest.mark.parametrize("kind", ["seeded", "fused", "mixed", "tied"])
def test_sizes_are_those_of_the_tensors(tmp_path: Path, toy_folders: dict[str, Path], kind: str) -> None:
    made = {
        "seeded": lambda: drawn(tmp_path, "qwen3_moe"),
        "fused": lambda: fused_copy(toy_folders["moe"], tmp_path / "f"),
    }
    base = open_base(made[kind]() if kind in made else toy_folders[kind])
    assert isinstance(base, SeededWeights if kind == "seeded" else BaseWeights)
    assert base.sizes() == {name: base[name].numel() for name in base}


@pytest.mark.parametrize("parameters", ["lora", "full"])
def test_a_tensor_of_half_a_word_leaves_the_stock_push(tmp_path: Path, parameters: str) -> None:
    """Norms of six numbers: 12 bytes in bf16, 24 in fp32."""
    folder = str(drawn(tmp_path, "qwen3", head_dim=6))
    assert "k_norm" in serving.explain_uneven(open_base(folder).sizes(), torch.bfloat16)
    for dtype, ways in (("bfloat16", ("stock",)), ("float32", ("direct", "nccl", "stock"))):
        spec = RunSpec(model=folder, parameters=parameters, engine=EngineSpec(dtype=dtype))
        assert serving.transfers(spec, MemoryPort()) == ways
