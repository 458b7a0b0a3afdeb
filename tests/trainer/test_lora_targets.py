"""Which linears an adapter is on, and how it is scaled: what a run stores is what PEFT computes with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from artd_schema.run.spec import LoraSpec, RunSpec, Target
from artd_workers.trainer.model.lora import Lora, adapter_config
from artd_workers.trainer.parameters.trained import AdapterState, open_model
from artd_workers.trainer.tools.export import _weights

from . import rig
from .test_parity import TOKENS, all_logits

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
CASES = [
    LoraSpec(rank=4, alpha=6, rslora=True),
    LoraSpec(rank=4, alpha=8, targets=("o_proj",)),
    LoraSpec(rank=4, alpha=8, targets=ATTENTION),
    LoraSpec(rank=4, alpha=6, targets=MLP, rslora=True),
]


@pytest.mark.parametrize("family", ["llama", "moe"])
@pytest.mark.parametrize("asked", CASES, ids=["rslora", "o", "attention", "mlp-rslora"])
def test_peft_computes_the_same_with_what_is_stored(
    toy_folders: dict[str, Path], tmp_path: Path, family: str, asked: LoraSpec
) -> None:
    """The logits of PEFT with the stored folder, and of the merged export, are the trainer's; no other linear has a tensor there."""
    folder, out = toy_folders[family], tmp_path / "adapter"
    policy, trained = open_model(RunSpec(model=str(folder), lora=asked))
    assert isinstance(trained, AdapterState) and isinstance(trained.parameters, Lora)
    trained.initialise(3)
    generator = torch.Generator().manual_seed(12)  # another draw may bring a router's tie, which rounding decides
    with torch.no_grad():
        for name, parameter in trained.parameters.list_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.05, generator=generator)
    out.mkdir()
    lora = trained.parameters
    save_file({name: tensor.contiguous() for name, tensor in lora.state().items()}, out / "adapter_model.safetensors")
    config = adapter_config(str(folder), policy.plan.codec, lora.rank, lora.alpha)
    (out / "adapter_config.json").write_text(json.dumps(config))
    assert {name.split(".")[-3] for name in trained.parameters.state()} == set(asked.targets or (*ATTENTION, *MLP))
    with torch.no_grad():
        ours = all_logits(policy, TOKENS)
        bare = rig.reference(folder)(TOKENS[None]).logits[0]
        peft = PeftModel.from_pretrained(rig.reference(folder), out)(TOKENS[None]).logits[0]
        merged = rig.reference(folder)
        rig.load_weights(merged, dict(_weights(folder, out, torch.float32)))
        assert (ours - bare).abs().max() > 0.01, "the adapter does nothing, so this test tells nothing"
        assert (ours - peft).abs().max() <= 1e-5
        assert (ours - merged(TOKENS[None]).logits[0]).abs().max() <= 1e-5


def test_the_scale_is_that_of_pefts_own_rank_stabilised_adapters(toy_folders: dict[str, Path]) -> None:
    """alpha / sqrt(rank), and not alpha / rank: PEFT computes it from the run's own numbers."""
    asked = LoraSpec(rank=4, alpha=6, rslora=True)
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["o_proj"])
    layer = (
        get_peft_model(rig.reference(toy_folders["llama"]), config).base_model.model.model.layers[0].self_attn.o_proj
    )
    _, trained = open_model(RunSpec(model=str(toy_folders["llama"]), lora=asked))
    assert isinstance(trained.parameters, Lora)
    assert trained.parameters.scale == layer.scaling["default"] == asked.scale == 3.0
    assert LoraSpec(rank=4, alpha=6).scale == 1.5 and LoraSpec(rank=4, alpha=6).stored_alpha == 6


@pytest.mark.parametrize("targets", [("q_proj",), ("gate_proj", "o_proj")])
def test_a_part_of_one_product_is_refused(toy_folders: dict[str, Path], targets: tuple[Target, ...]) -> None:
    with pytest.raises(ValueError, match="adapted together"):
        open_model(RunSpec(model=str(toy_folders["llama"]), lora=LoraSpec(targets=targets)))
