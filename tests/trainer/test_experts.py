"""Mixtures of experts: how checkpoints store them, which configs are taken, adapters on every expert, RouterReplay at rest.

Parity of logits, gradients, trees, merge and canary is tested with the other families, in their files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from artd.models.base_model import ModelConfig
from artd.models.base_model import read_config as daemon_config
from artd_workers.models.base import UnsupportedModel
from artd_workers.models.experts import parts
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer.model.model import Policy, build
from artd_workers.transfer.merge import BaseWeights
from tests import toys

from . import rig
from .test_parity import TOKENS, all_logits, base_policy

pytestmark = pytest.mark.torch
FILE = "model.safetensors"
EXPERTS = "model.layers.0.mlp.experts"


def in_transformers_names(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights per expert -> in the names of transformers' parameters, written out here for a second time."""
    out = {}
    for name in model.state_dict():
        stem, _, last = name.rpartition(".")
        numbers = range(toys.EXPERTS)
        if last == "gate_up_proj":
            pairs = [[weights[f"{stem}.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in numbers]
            out[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif last == "down_proj":
            out[name] = torch.stack([weights[f"{stem}.{e}.down_proj.weight"] for e in numbers])
        elif name in weights:
            out[name] = weights[name]
    return out


def fused_copy(folder: Path, out: Path) -> Path:
    """The checkpoint with each layer's experts in transformers 5's two tensors."""
    shutil.copytree(folder, out)
    save_file(in_transformers_names(rig.reference(folder), load_file(folder / FILE)), out / FILE)
    return out


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_fused_checkpoints_are_the_same_model(sparse_folder: Path, tmp_path: Path) -> None:
    fused, apart = BaseWeights(fused_copy(sparse_folder, tmp_path / "fused")), BaseWeights(sparse_folder)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "fused" / FILE))
    assert list(fused) == list(apart)
    for name in apart:
        assert torch.equal(fused[name], apart[name]) and fused[name].is_contiguous(), name
    with torch.no_grad():
        one, two = (all_logits(base_policy(folder), TOKENS) for folder in (sparse_folder, tmp_path / "fused"))
    assert torch.equal(one, two)


@pytest.mark.parametrize("original", [True, False])
def test_what_transformers_writes_is_read(sparse_folder: Path, tmp_path: Path, original: bool) -> None:
    """In a checkpoint's names and in its own; its config says `num_local_experts`."""
    hf = rig.reference(sparse_folder)
    hf.save_pretrained(tmp_path / "saved", save_original_format=original)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "num_experts" not in config and config["num_local_experts"] == toys.EXPERTS
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "saved" / FILE)) != original
    policy = base_policy(tmp_path / "saved")
    assert policy.plan.routes == plan_for(read_config(sparse_folder)).routes
    assert policy.plan.routes == daemon_config(tmp_path / "saved").routes()
    with torch.no_grad():
        assert (all_logits(policy, TOKENS) - hf(TOKENS[None]).logits[0]).abs().max() <= 1e-5


def test_an_expert_stored_twice_or_in_an_odd_shape(sparse_folder: Path, tmp_path: Path) -> None:
    folder = fused_copy(sparse_folder, tmp_path / "fused")
    weights = load_file(folder / FILE)
    save_file(weights | {f"{EXPERTS}.3.up_proj.weight": torch.zeros(64, 128)}, folder / FILE)
    with pytest.raises(ValueError, match=r"experts\.3\.up_proj\.weight"):
        BaseWeights(folder)
    save_file(weights | {f"{EXPERTS}.gate_up_proj": torch.zeros(8, 7, 4)}, folder / FILE)
    with pytest.raises(ValueError, match=r"gate_up_proj has the shape \(8, 7, 4\)"):
        BaseWeights(folder)


def test_only_experts_are_split() -> None:
    assert not list(parts("model.layers.0.mlp.down_proj.weight", (4, 4)))
    assert not list(parts("model.layers.0.mlp.experts.0.down_proj.weight", (4, 4)))
    assert not list(parts("model.layers.0.mlp.gate_up_proj", (4, 4)))
    names = [name for name, _ in parts(f"{EXPERTS}.gate_up_proj", (2, 6, 5))]
    assert names == [f"{EXPERTS}.{e}.{part}_proj.weight" for e in (0, 1) for part in ("gate", "up")]


# ---- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mlp_only_layers": [0, 2]},
        {"decoder_sparse_step": 2, "num_hidden_layers": 4},
        {"decoder_sparse_step": 3},
        {"mlp_only_layers": None},
        {"mlp_only_layers": [0, 1, 2]},
        {"num_experts": 300, "num_experts_per_tok": 7},
    ],
)
def test_routes_are_those_of_the_daemon_and_of_transformers(change: dict[str, Any]) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = toys.config("qwen3_moe", **change)
    plan = plan_for(config)
    known = {name: config[name] for name in ModelConfig.__struct_fields__ if name in config}
    known |= {"mlp_only_layers": tuple(config["mlp_only_layers"] or ()), "architectures": None}
    assert plan.routes == ModelConfig(**known).routes()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))
    pattern = [int(hasattr(layer.mlp, "experts")) for layer in model.model.layers]
    assert plan.transformer.get("moe_layer_freq", [0] * len(pattern)) == pattern


def test_a_plan_without_sparse_layers_is_dense(tmp_path: Path) -> None:
    folder = toys.make(tmp_path / "dense", "qwen3_moe", mlp_only_layers=[0, 1, 2])
    policy = base_policy(folder)
    assert policy.plan.routes is None
    with torch.no_grad():
        wanted = rig.reference(folder)(TOKENS[None]).logits[0]
        assert (all_logits(policy, TOKENS) - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_experts_per_tok = 9", {"num_experts_per_tok": 9}),
        ("num_experts_per_tok = 0", {"num_experts_per_tok": 0}),
        ("norm_topk_prob with num_experts_per_tok = 1", {"num_experts_per_tok": 1}),
        ("shared_expert_intermediate_size", {"shared_expert_intermediate_size": 64}),
        ("use_sliding_window", {"use_sliding_window": True}),
    ],
)
def test_refusals(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        plan_for(toys.config("qwen3_moe", **change))


@pytest.mark.parametrize("topk", [1, 3])
def test_other_numbers_of_experts(tmp_path: Path, topk: int) -> None:
    """Top 1 without normalisation, and a top 3 whose weights are."""
    folder = toys.make(tmp_path / "toy", "qwen3_moe", num_experts_per_tok=topk, norm_topk_prob=topk > 1)
    with torch.no_grad():
        wanted = rig.reference(folder)(TOKENS[None]).logits[0]
        assert (all_logits(base_policy(folder), TOKENS) - wanted).abs().max() <= 1e-5


# ---- sensitivity ----------------------------------------------------------------------------------------------------


def test_wrong_routing_is_seen(toy_folders: dict[str, Path]) -> None:
    """Parity must fail for the other normalisation and for two experts in each other's place."""
    folder = toy_folders["moe"]
    plan, base = plan_for(read_config(folder)), dict(BaseWeights(folder))
    with torch.no_grad():
        wanted = rig.reference(folder)(TOKENS[None]).logits[0]

        def error(plan: Any, weights: dict[str, Tensor]) -> float:
            return float((all_logits(Policy(plan, build(plan, weights), None), TOKENS) - wanted).abs().max())

        other = replace(plan, transformer=plan.transformer | {"moe_router_pre_softmax": True})
        assert error(other, base) > 1e-2
        swapped = {name.replace(".experts.1.", ".experts.x."): t for name, t in base.items()}
        swapped = {name.replace(".experts.0.", ".experts.1."): t for name, t in swapped.items()}
        swapped = {name.replace(".experts.x.", ".experts.0."): t for name, t in swapped.items()}
        assert error(plan, swapped) > 1e-2
        assert error(plan, base) <= 1e-5


def test_replay_at_rest_changes_no_bit(sparse_folder: Path) -> None:
    plan, base = plan_for(read_config(sparse_folder)), BaseWeights(sparse_folder)
    off = replace(plan, transformer=plan.transformer | {"moe_enable_routing_replay": False}, routes=plan.routes)
    bare = build(off, base)
    policy = Policy(plan, build(plan, base), None)
    routers = [module for module in policy.model.modules() if getattr(module, "router_replay", None) is not None]
    assert plan.routes is not None and len(routers) == plan.routes.layers
    assert not any(getattr(module, "router_replay", None) for module in bare.modules())
    stock = Policy(replace(off, routes=None), bare, None)
    with torch.no_grad():
        assert torch.equal(all_logits(policy, TOKENS), all_logits(stock, TOKENS))


# ---- adapters -------------------------------------------------------------------------------------------------------


def test_adapters_on_every_expert(sparse_folder: Path) -> None:
    """Names and gradients, against transformers with W + scale B A put in as functions of A and B; routers stay as they are."""
    policy, hf, base = rig.make_policy(sparse_folder, seed=4), rig.reference(sparse_folder), BaseWeights(sparse_folder)
    adapter = {name: tensor.clone().requires_grad_() for name, tensor in policy.lora.state().items()}
    weights = {name: base[name] for name in base}
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[weight] = (
                weights[weight] + policy.lora.scale * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
            )
    adapted = {name for name in base if weights[name] is not None and weights[name].requires_grad}
    assert {name for name in base if ".experts." in name} < adapted
    assert not any(name.endswith("mlp.gate.weight") for name in adapted)
    assert adapted == {name for name in base if name.endswith("_proj.weight")}

    out = torch.func.functional_call(hf, in_transformers_names(hf, weights), (TOKENS[None],))
    wanted = out.logits[0].log_softmax(-1)[:-1].gather(-1, TOKENS[1:, None]).mean()
    found = all_logits(policy, TOKENS).log_softmax(-1)[:-1].gather(-1, TOKENS[1:, None]).mean()
    assert (found - wanted).abs() <= 1e-6
    found.backward()
    wanted_grads = dict(zip(adapter, torch.autograd.grad(wanted, list(adapter.values())), strict=True))
    worst = {
        name: rig.relative(parameter.grad, wanted_grads[name]) for name, parameter in policy.lora.list_parameters()
    }
    assert max(worst.values()) <= 1e-5, max(worst.items(), key=lambda item: item[1])
    assert all(parameter.grad is None for name, parameter in policy.model.named_parameters() if ".adapter." not in name)


def test_an_expert_without_tokens_has_no_gradient(toy_folders: dict[str, Path]) -> None:
    """Zeros, not None: the optimizer counts its steps as everybody's."""
    policy = rig.make_policy(toy_folders["moe"])
    policy.score(TOKENS[:2], torch.arange(2), torch.ones(2, 2, dtype=torch.bool).triu(1), torch.tensor([0]), TOKENS[1:2],
                 torch.ones(1)).logprobs.sum().backward()  # fmt: skip
    grads = [parameter.grad for name, parameter in policy.lora.list_parameters() if ".experts." in name]
    assert all(grad is not None for grad in grads)
    assert sum(not grad.any() for grad in grads) >= 2 * 3 * (toys.EXPERTS - 2 * toys.TOPK)
