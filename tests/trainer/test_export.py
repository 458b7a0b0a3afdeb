"""The merged export: the bits of the one merge, checked against weights.json, in shards where asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from artd_schema.codec import to_json
from artd_schema.data.manifest import WeightEntry, WeightTable
from artd_schema.run.families import SEEDED
from artd_workers.models import seeded
from artd_workers.trainer.checkpoint.folder import entry_of
from artd_workers.trainer.tools.export import ExportError, export
from artd_workers.transfer.checksum import sum_of
from artd_workers.transfer.merge import BaseWeights, merged_tensors, open_base
from tests import toys

pytestmark = pytest.mark.torch
RANK, ALPHA = 2, 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make(tmp_path_factory.mktemp("base") / "toy", "qwen3", tied=True)


@pytest.fixture(params=["sha256", "sum64"])
def checkpoint(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Path:
    """An adapter on two weights, and the table of what is served merged in fp32, as a CPU lists it and as a GPU."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    weights = BaseWeights(base)
    adapter = {}
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        rows, columns = weights[name].shape
        stem = "base_model.model." + name.removesuffix(".weight")
        adapter[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
        adapter[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    save_file(adapter, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    merged = merged_tensors(weights, adapter, ALPHA / RANK, torch.float32)
    table = [
        WeightEntry(name, "float32", tuple(t.shape), sum64=sum_of(t)) if request.param == "sum64" else entry_of(name, t)
        for name, t in merged
    ]
    (folder / "weights.json").write_bytes(to_json(WeightTable(mode="merged", tensors=tuple(table))))
    return folder


def test_weights_and_companions(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    count = export(base, checkpoint, out, torch.float32)
    found = load_file(out / "model.safetensors")
    assert count == len(found) == len(BaseWeights(base)) and "lm_head.weight" not in found
    for name, tensor in merged_tensors(
        BaseWeights(base), load_file(checkpoint / "adapter_model.safetensors"), 3.0, torch.float32
    ):
        assert torch.equal(found[name], tensor), name
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    plain = BaseWeights(base)["model.layers.0.self_attn.q_proj.weight"]
    expected = plain + 3.0 * adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
    assert torch.allclose(found["model.layers.0.self_attn.q_proj.weight"], expected, atol=1e-5)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def test_an_export_of_a_drawn_base_is_no_drawn_base(checkpoint: Path, tmp_path: Path) -> None:
    """Read back, its weights are the trained ones."""
    drawn, out = seeded.make(tmp_path / "drawn", toys.config("qwen3", tied=True)), tmp_path / "out"
    (checkpoint / "weights.json").unlink()
    export(drawn, checkpoint, out, torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(open_base(out)[name], load_file(out / "model.safetensors")[name])
    assert not torch.equal(open_base(out)[name], open_base(drawn)[name])
    (out / SEEDED).write_text((drawn / SEEDED).read_text())
    with pytest.raises(ValueError, match=r"both seeded\.json and weights"):
        open_base(out)


def test_a_changed_base_is_refused(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    table = json.loads((checkpoint / "weights.json").read_text())
    row = table["tensors"][3]
    row |= {"sha256": "0" * 64} if row["sum64"] is None else {"sum64": row["sum64"] ^ 1}
    (checkpoint / "weights.json").write_text(json.dumps(table))
    with pytest.raises(ExportError, match=r"weights\.json"):
        export(base, checkpoint, tmp_path / "out", torch.float32)


def test_a_tensor_that_the_base_lacks_is_told(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    table = json.loads((checkpoint / "weights.json").read_text())
    table["tensors"].append(table["tensors"][0] | {"name": "gone"})
    (checkpoint / "weights.json").write_text(json.dumps(table))
    with pytest.raises(ExportError, match="gone"):
        export(base, checkpoint, tmp_path / "out", torch.float32)


def test_shards_with_an_index_load_in_transformers(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    export(base, checkpoint, out, torch.bfloat16, shard_bytes=300_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 1 and sorted(set(index["weight_map"].values())) == files
    assert not list(out.glob("part-*"))
    total = sum(t.numel() * 2 for path in files for t in load_file(out / path).values())
    assert index["metadata"]["total_size"] == total
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(model.state_dict()[name], load_file(out / index["weight_map"][name])[name])
