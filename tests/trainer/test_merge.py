"""The merge: its definition, its bits, its errors."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from artd_workers.transfer.merge import BaseWeights, merge, merged_tensors

from . import rig

pytestmark = pytest.mark.torch
PATHS = {"PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("schema", "workers"))}


def by_hand(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """The definition, one rank at a time over the whole matrix, each operation rounded to fp32."""
    total = torch.zeros_like(weight)
    for r in range(len(a)):
        total = total + b[:, r : r + 1] * a[r : r + 1]
    return weight + total * scale


@pytest.mark.parametrize("shape", [(96, 40), (1, 7), (700, 301)])
def test_bits(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    a, b = torch.randn(5, shape[1], generator=generator), torch.randn(shape[0], 5, generator=generator)
    before = weight.clone()
    wanted = by_hand(weight, a, b, 2.0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(merge(weight, a, b, 2.0, torch.float32), wanted)
        assert torch.equal(merge(weight, a, b, 2.0, torch.bfloat16), wanted.bfloat16())
    torch.set_num_threads(1)
    assert torch.equal(weight, before), "the base was mutated"
    exact = weight.double() + 2.0 * (b.double() @ a.double())
    assert (wanted - exact).abs().max() < 1e-4


def test_order_names_and_tied_head(folder: Path) -> None:
    policy = rig.make_policy(folder)
    names = [name for name, _ in merged_tensors(BaseWeights(folder), policy.lora.state(), 2.0, torch.float32)]
    assert names == sorted(names)
    assert ("lm_head.weight" in names) == (folder.name not in ("tied", "mixed"))
    assert len(names) == len(set(names)) == len(BaseWeights(folder))


def test_the_engine_can_import_it() -> None:
    """Without Megatron, transformers and our modules that need more than torch."""
    code = (
        "import sys; sys.modules['megatron'] = sys.modules['transformers'] = None; import artd_workers.transfer.merge;"
        "print([m for m in sys.modules if m.startswith('artd_workers.')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | PATHS
    )
    own = {"artd_workers.transfer", "artd_workers.transfer.merge", "artd_workers.models", "artd_workers.packages"}
    found = set(ast.literal_eval(out.stdout))
    assert own <= found and all(name.startswith("artd_workers.models.") for name in found - own)


def test_zero_b_is_the_base(folder: Path) -> None:
    policy, base = rig.make_policy(folder, random_b=False), BaseWeights(folder)
    assert all(torch.equal(t, base[n]) for n, t in merged_tensors(base, policy.lora.state(), 2.0, torch.float32))


def test_bad_adapters(folder: Path) -> None:
    base = BaseWeights(folder)
    one = {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(2, 128)}
    other = {"base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": torch.zeros(256, 2)}
    with pytest.raises(ValueError, match=r"layers\.9\.mlp\.up_proj\.weight.*base model lacks"):
        list(merged_tensors(base, one | other, 1.0, torch.float32))
    with pytest.raises(ValueError, match="not a PEFT"):
        list(merged_tensors(base, {"q_proj.lora_A.weight": torch.zeros(2, 128)}, 1.0, torch.float32))
    with pytest.raises(ValueError, match="without its lora_A"):
        list(merged_tensors(base, other, 1.0, torch.float32))
