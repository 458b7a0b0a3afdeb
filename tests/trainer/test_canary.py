"""The canary: right logprobs, ids that are allowed, bounds, and a 1 % perturbation that must break it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from artd_workers.models.registry import plan_for
from artd_workers.trainer.checkpoint import canary
from artd_workers.trainer.model.layers import narrowest_choices
from artd_workers.transfer.merge import BaseWeights, merged_tensors
from tests import toys

from . import rig

pytestmark = pytest.mark.torch


def differences(hf: torch.nn.Module, weights: dict[str, torch.Tensor], probe: canary.Canary) -> torch.Tensor:
    """|Hugging Face with these merged weights - canary| per scored token."""
    rig.load_weights(hf, weights)
    with torch.no_grad():
        rows = [rig.hf_logprobs(hf, torch.tensor(ids)) for ids in probe.prompts]
    return (torch.cat(rows) - torch.tensor([x for row in probe.logprobs for x in row])).abs()


def test_scores_are_those_of_the_merged_weights(folder: Path) -> None:
    policy = rig.make_policy(folder)
    probe = canary.score(policy, "float32")
    assert [len(ids) for ids in probe.prompts] == [32] * 4 and [len(row) for row in probe.logprobs] == [31] * 4
    merged = dict(merged_tensors(BaseWeights(folder), policy.lora.state(), policy.lora.scale, torch.float32))
    found = differences(rig.reference(folder), merged, probe)
    assert found.max() <= probe.max_abs and 1e-5 <= probe.max_abs < 3e-5 and found.mean() <= probe.mean_abs == 1e-5
    assert canary.score(rig.make_policy(folder, seed=7), "float32").logprobs != probe.logprobs


def test_every_perturbed_matrix_is_seen(folder: Path) -> None:
    """By 1 % noise: Qwen3's norms of q and k undo a common factor, so there 1.01 x q_proj is the same model."""
    policy = rig.make_policy(folder)
    probe = canary.score(policy, "float32")
    merged = dict(merged_tensors(BaseWeights(folder), policy.lora.state(), policy.lora.scale, torch.float32))
    matrices = [name for name, tensor in merged.items() if tensor.ndim == 2]
    sparse = {"moe": toys.LAYERS, "mixed": toys.LAYERS - 1}.get(folder.name, 0)
    linears = 7 * (toys.LAYERS - sparse) + (4 + 1 + 3 * toys.EXPERTS) * sparse
    assert len(matrices) == linears + (1 if folder.name in ("tied", "mixed") else 2)
    generator, hf = torch.Generator().manual_seed(3), rig.reference(folder)
    for name in matrices:
        noise = 1 + 0.01 * torch.randn(merged[name].shape, generator=generator)
        found = differences(hf, merged | {name: merged[name] * noise}, probe)
        assert found.max() > 5 * probe.max_abs, f"{name} with 1 % noise passes"


def test_prompts_avoid_special_ids() -> None:
    plan = plan_for(toys.config("llama", vocab_size=16, eos_token_id=[2, 3, 4], pad_token_id=0, bos_token_id=1))
    ids = canary.prompts(plan)
    assert ids == canary.prompts(plan)
    assert {i for row in ids for i in row} <= set(range(5, 16))


def test_bounds(toy_folders: dict[str, Path]) -> None:
    toy = plan_for(toys.config("llama"))
    large = plan_for(toys.config("llama", num_hidden_layers=5))
    assert canary.bounds(toy, "float32") == (1e-5, 1e-5)
    assert canary.bounds(large, "float32") == (2e-4, 2e-4)
    assert canary.bounds(toy, "bfloat16") == canary.bounds(toy, "bfloat16", room=(0.2, 0.006)) == (2.0, 0.05)
    assert canary.bounds(toy, "bfloat16", room=(4.1, 0.16)) == (4.1, 0.16)
    assert canary.bounds(toy, "float32", room=(3e-5, 3e-6)) == (3e-5, 1e-5)
    sparse = plan_for(toys.config("qwen3_moe"))
    assert canary.bounds(sparse, "bfloat16") == (4.0, 0.2)
    assert canary.bounds(sparse, "float32", 1e-3) == (1e-5, 1e-5)
    assert canary.bounds(sparse, "float32", 1e-5) == (4.0, 0.2)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_deep_model_may_be_as_far_off_as_bf16_makes_it(tmp_path: Path, family: str) -> None:
    """It amplifies rounding: what a toy is granted would refuse the right weights, and wrong ones are refused still."""
    folder = toys.make(tmp_path / "deep", family, seed=1, std=0.14, num_hidden_layers=24)
    policy = rig.make_policy(folder)
    before, probe = canary.score(policy, "float32"), canary.score(policy, "bfloat16")
    assert canary.score(policy, "float32") == before and probe.logprobs == before.logprobs, "nothing is left of it"
    merged = dict(merged_tensors(BaseWeights(folder), policy.lora.state(), policy.lora.scale, torch.bfloat16))
    hf = rig.reference(folder, torch.bfloat16)
    right = differences(hf, merged, probe)
    assert canary.BF16_MEAN < right.mean() < probe.mean_abs * 0.6 and right.max() < probe.max_abs
    one, other = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (11, 12))
    assert differences(hf, merged | {one: merged[other], other: merged[one]}, probe).mean() > probe.mean_abs


def test_a_sharp_model_may_be_as_far_off_as_fp32_makes_it(tmp_path: Path) -> None:
    """Seen: such a model was refused for ever at 1.05e-5 against a fixed 1e-5. Wrong weights are refused still."""
    folder = toys.make(tmp_path / "sharp", "llama", seed=1, std=0.15)
    policy = rig.make_policy(folder)
    probe = canary.score(policy, "float32")
    merged = dict(merged_tensors(BaseWeights(folder), policy.lora.state(), policy.lora.scale, torch.float32))
    hf = rig.reference(folder)
    right = differences(hf, merged, probe)
    assert right.max() < probe.max_abs < 1e-4 and right.mean() < probe.mean_abs
    assert probe.max_abs > 2e-5, "Hugging Face's own rounding is 1.2e-5 (against fp64)"
    name = "model.layers.1.self_attn.o_proj.weight"
    assert differences(hf, merged | {name: merged[name] * 1.001}, probe).max() > 2 * probe.max_abs


def test_the_base_is_scored_without_its_adapter(folder: Path) -> None:
    policy = rig.make_policy(folder)
    base = canary.score_base(policy)
    probe = canary.score(policy, "bfloat16", base=base)
    plain = canary.score(rig.make_policy(folder, random_b=False), "bfloat16")
    assert probe.base == plain.logprobs != probe.logprobs and 0 < probe.rounding < probe.max_abs
    assert canary.score(policy, "bfloat16").logprobs == probe.logprobs, "the adapter is there again"
    assert canary.score(policy, "bfloat16").base == ()


def test_a_near_tie_of_the_base_widens_the_bounds_of_a_step_without_one(toy_folders: dict[str, Path]) -> None:
    """The engine scores the base, too, and its rounding may choose the other expert there."""
    policy = rig.make_policy(toy_folders["moe"])
    base = canary.score_base(policy)
    assert math.isfinite(base.gap)
    wide = canary.score(policy, "float32", base=canary.Base(base.logprobs, 1.0))
    tied = canary.score(policy, "float32", base=canary.Base(base.logprobs, 1e-9))
    assert tied.max_abs == canary.ROUTED_MAX > wide.max_abs


def test_two_experts_that_are_nearly_equal_widen_the_bounds(toy_folders: dict[str, Path]) -> None:
    """With the tie in place an engine's rounding may choose either, and nothing would be wrong with it."""
    policy, logits = rig.make_policy(toy_folders["moe"]), []
    routers = [layer.mlp.router for layer in policy.model.decoder.layers]
    hooks = [r.register_forward_pre_hook(lambda r, args: logits.append(args[0] @ r.weight.t())) for r in routers]
    with narrowest_choices(policy.model) as gaps:
        policy.score_sequence(torch.arange(3, 40))
    for hook in hooks:
        hook.remove()
    ordered = [one.sort(-1, descending=True).values for one in logits]
    wanted = [float((one[..., toys.TOPK - 1] - one[..., toys.TOPK]).min()) for one in ordered]
    assert len(wanted) == toys.LAYERS and gaps == pytest.approx(wanted, abs=1e-6)

    assert 1e-5 <= canary.score(policy, "float32").max_abs < 3e-5
    with torch.no_grad():
        for router in routers:
            router.weight.mul_(1e-4)
    assert canary.score(policy, "float32").max_abs == 4.0
