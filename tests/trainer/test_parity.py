"""Megatron against Hugging Face, exactly: logits, gradients, round trips, the exported adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from artd_workers.models.base import UnsupportedModel
from artd_workers.models.codec import Row
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer.model.lora import adapter_config
from artd_workers.trainer.model.model import Policy, build
from artd_workers.transfer.merge import BaseWeights, merged_tensors
from tests import toys

from . import rig

pytestmark = pytest.mark.torch
TOKENS = torch.randint(3, 1024, (48,), generator=torch.Generator().manual_seed(5))


def all_logits(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    size = len(tokens)
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    return policy.hidden_logits(tokens, torch.arange(size), mask, torch.arange(size))


def base_policy(folder: Path) -> Policy:
    plan = plan_for(read_config(folder))
    return Policy(plan, build(plan, BaseWeights(folder)), None)


def test_logits_and_logprobs(folder: Path) -> None:
    policy, hf = base_policy(folder), rig.reference(folder)
    with torch.no_grad():
        wanted = hf(TOKENS[None]).logits[0]
        assert wanted.abs().max() > 1, "the toy's logits are too small to tell anything"
        assert (all_logits(policy, TOKENS) - wanted).abs().max() <= 1e-5
        assert (policy.score_sequence(TOKENS) - rig.hf_logprobs(hf, TOKENS)).abs().max() <= 1e-5
        assert (policy.score_sequence(TOKENS, 0.7) - rig.hf_logprobs(hf, TOKENS, 0.7)).abs().max() <= 1e-5


def test_base_gradients(folder: Path) -> None:
    policy, hf = base_policy(folder), rig.reference(folder)
    policy.model.requires_grad_(True)
    logits = all_logits(policy, TOKENS)
    logits.log_softmax(-1)[:-1].gather(-1, TOKENS[1:, None]).mean().backward()
    rig.hf_logprobs(hf, TOKENS).mean().backward()
    found = dict(policy.plan.codec.to_hf({name: p.grad for name, p in policy.model.named_parameters()}))
    wanted = rig.per_expert({name: p.grad for name, p in hf.named_parameters()})
    assert set(found) == set(wanted)
    worst = {name: rig.relative(found[name], wanted[name]) for name in wanted}
    assert max(worst.values()) <= 1e-5, max(worst.items(), key=lambda item: item[1])


def export_adapter(policy: Policy, base: Path, out: Path) -> Path:
    assert policy.lora is not None
    out.mkdir()
    save_file({k: v.contiguous() for k, v in policy.lora.state().items()}, out / "adapter_model.safetensors")
    config = adapter_config(str(base), policy.plan.codec, rig.RANK, rig.ALPHA)
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def peft_logits(policy: Policy, folder: Path, out: Path) -> tuple[torch.Tensor, torch.nn.Module]:
    """(logits, PEFT's model) of the exported adapter in transformers + peft, which must do something."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(rig.reference(folder), export_adapter(policy, folder, out), is_trainable=True)
    with torch.no_grad():
        wanted = model(TOKENS[None]).logits[0]
        bare = rig.reference(folder)(TOKENS[None]).logits[0]
    assert (wanted - bare).abs().max() > 0.1, "the adapter does nothing, so this test tells nothing"
    return wanted, model


def test_exported_adapter_in_peft(dense_folder: Path, tmp_path: Path) -> None:
    """Equal logits and equal LoRA gradients in transformers + peft."""
    policy = rig.make_policy(dense_folder, seed=4)
    wanted, model = peft_logits(policy, dense_folder, tmp_path / "adapter")
    logits = all_logits(policy, TOKENS)
    assert (logits - wanted).abs().max() <= 1e-5
    logits.log_softmax(-1)[:-1].gather(-1, TOKENS[1:, None]).mean().backward()
    rig.hf_logprobs(model, TOKENS).mean().backward()
    wanted_grads = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if "lora_" in n}
    found = {name: p.grad for name, p in policy.lora.list_parameters()}
    assert set(found) == set(wanted_grads) and len(found) == 2 * 7 * toys.LAYERS
    assert max(rig.relative(found[name], wanted_grads[name]) for name in found) <= 1e-5


@pytest.mark.parametrize(
    "changes", [{}, {"mlp_only_layers": [1]}, {"num_hidden_layers": 6, "decoder_sparse_step": 3}], ids=str
)
def test_exported_adapter_of_experts_in_peft(changes: dict[str, Any], tmp_path: Path) -> None:
    """PEFT puts the experts' adapters into transformers' fused ones, and those of dense layers between sparse ones into their
    linears: equal logits (gradients there are of other tensors)."""
    folder = toys.make(tmp_path / "toy", "qwen3_moe", **changes)
    policy = rig.make_policy(folder, seed=4)
    wanted, _ = peft_logits(policy, folder, tmp_path / "adapter")
    with torch.no_grad():
        assert (all_logits(policy, TOKENS) - wanted).abs().max() <= 1e-5


def test_round_trip_is_exact(folder: Path) -> None:
    policy, base = base_policy(folder), BaseWeights(folder)
    back = dict(policy.plan.codec.to_hf(policy.model.state_dict()))
    assert set(back) == set(base)
    assert all(torch.equal(back[name], base[name]) for name in base)


def test_merged_weights_give_the_policy(folder: Path) -> None:
    """The merged export in Hugging Face scores as base + adapter in Megatron."""
    policy, hf = rig.make_policy(folder, seed=6), rig.reference(folder)
    merged = dict(merged_tensors(BaseWeights(folder), policy.lora.state(), policy.lora.scale, torch.float32))
    rig.load_weights(hf, merged)
    with torch.no_grad():
        assert (policy.score_sequence(TOKENS) - rig.hf_logprobs(hf, TOKENS)).abs().max() <= 1e-5


@pytest.mark.parametrize("break_it", ["concat", "no_interleave"])
def test_a_wrong_layout_is_seen(toy_folders: dict[str, Path], break_it: str) -> None:
    """Sensitivity: parity must fail for a wrong fuse."""
    folder = toy_folders["llama"]
    plan, base = plan_for(read_config(folder)), BaseWeights(folder)
    rows = []
    for row in plan.codec.rows:
        if break_it == "no_interleave" and row.layout == "query_groups":
            row = Row(row.megatron, row.parts, "concat", row.lora)
        if break_it == "concat" and row.layout == "concat":
            row = Row(row.megatron, row.parts[::-1], "concat", row.lora)
        rows.append(row)
    wrong = type(plan.codec)(tuple(rows), plan.codec.shape)
    broken = type(plan)(**{**plan.__dict__, "codec": wrong})
    policy = Policy(broken, build(broken, base), None)
    with torch.no_grad():
        assert (all_logits(policy, TOKENS) - rig.reference(folder)(TOKENS[None]).logits[0]).abs().max() > 1e-2


def test_llama3_rope(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    folder = toys.make(tmp_path / "rope", "llama", rope_theta=500000.0, rope_scaling=rope)
    policy, hf = base_policy(folder), rig.reference(folder)
    with torch.no_grad():
        wanted = hf(TOKENS[None]).logits[0]
    assert (all_logits(policy, TOKENS) - wanted).abs().max() <= 1e-5


def test_bf16_and_sharded_checkpoints(tmp_path: Path) -> None:
    """A bf16 checkpoint in two shards is widened exactly."""
    whole = toys.make(tmp_path / "whole", "qwen3", dtype="bfloat16")
    split = toys.make(tmp_path / "split", "qwen3", dtype="bfloat16")
    weights = load_file(split / "model.safetensors")
    (split / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, split / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    a, b = base_policy(whole), base_policy(split)
    with torch.no_grad():
        assert torch.equal(all_logits(a, TOKENS), all_logits(b, TOKENS))
        wanted = rig.reference(whole)(TOKENS[None]).logits[0]
        assert (all_logits(a, TOKENS) - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4096}),
        ("use_sliding_window", True),
    ],
)
def test_refusals_name_the_field(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match="rope" if field == "rope_scaling" else field):
        plan_for(toys.config("llama", **{field: value}))


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        plan_for(toys.config("llama") | {"architectures": ["GPT2LMHeadModel"]})


def test_incomplete_checkpoint(tmp_path: Path) -> None:
    folder = toys.make(tmp_path / "toy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        base_policy(folder)
