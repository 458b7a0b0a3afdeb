"""What merging in bf16 loses: the figures by another road, the policy left as it was, and which jobs have them."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from artd_schema.data.manifest import CheckpointManifest
from artd_schema.run.spec import EngineSpec, RunSpec
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer.checkpoint import canary, merge_loss
from artd_workers.trainer.model.lora import Lora, shapes_of
from artd_workers.trainer.model.model import ALONE, Policy, build
from artd_workers.trainer.placement import Placement
from artd_workers.transfer.merge import BaseWeights, adapter_targets, merge
from tests import toys

from . import rig
from .test_full import make_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
BF16 = torch.bfloat16


def made(folder: Path, update: float, grouped: bool = False, placement: Placement | None = None) -> Policy:
    """A policy whose B has the standard deviation `update`."""
    plan, base = plan_for(read_config(folder)), BaseWeights(folder)
    lora = Lora(plan.codec, shapes_of(plan.codec, base), rig.RANK, rig.ALPHA, grouped)
    lora.initialise(0)
    generator = torch.Generator().manual_seed(1)
    adapter = {
        name: one.clone() if ".lora_A." in name else torch.empty_like(one).normal_(0, update, generator=generator)
        for name, one in lora.state().items()
    }
    lora.load(adapter)
    return Policy(plan, build(plan, base, ALONE, placement or Placement(grouped=grouped)), lora)


def by_hand(folder: Path, policy: Policy) -> dict[str, float]:
    """The definitions, tensor by tensor, with the one merge and updates in fp64."""
    base, lora = BaseWeights(folder), policy.lora
    assert lora is not None
    elements = changed = 0
    along = square = 0.0
    for name, (a, b) in adapter_targets(lora.state()).items():
        before, served = base[name].to(BF16), merge(base[name], a, b, lora.scale, BF16)
        update = lora.scale * b.double() @ a.double()
        elements, changed = elements + update.numel(), changed + int((served != before).sum())
        along += float(((served.double() - before.double()) * update).sum())
        square += float(update.square().sum())
    return {"merge_changed": changed / elements, "merge_served": along / square}


def kl_by_hand(folder: Path, policy: Policy) -> float:
    """By transformers: each canary prompt under the merged weights, every one of them rounded, against our policy."""
    base, lora = BaseWeights(folder), policy.lora
    assert lora is not None
    targets = adapter_targets(lora.state())
    weights = {
        name: (merge(one, *targets[name], lora.scale, BF16) if name in targets else one.to(BF16)).float()
        for name, one in base.items()
    }
    hf = rig.reference(folder)
    with torch.no_grad():
        rig.load_weights(hf, weights)
        asked = canary.row(policy.plan)
        ours = policy.hidden_logits(asked.tokens, asked.positions, asked.seen, asked.rows).double().log_softmax(-1)
        prompts = asked.tokens.view(canary.PROMPTS, -1)
        theirs = torch.cat([hf(one[None]).logits[0, :-1] for one in prompts]).double().log_softmax(-1)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


@pytest.mark.parametrize("update", [1e-3, 0.1])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_figures_are_their_definitions(toy_folders: dict[str, Path], update: float, grouped: bool) -> None:
    """A small update of which much vanishes, and one of which nearly all is served."""
    folder = toy_folders["mixed"]
    policy = made(folder, update, grouped)
    found, wanted = merge_loss.measure(policy, BF16, canary.row(policy.plan)), by_hand(folder, policy)
    assert found["merge_changed"] == pytest.approx(wanted["merge_changed"], rel=1e-3)
    assert found["merge_served"] == pytest.approx(wanted["merge_served"], rel=1e-3)
    assert (found["merge_changed"] < 0.6) == (update < 0.01), found
    assert found["merge_kl"] == pytest.approx(kl_by_hand(folder, policy), rel=1e-2) and found["merge_kl"] > 1e-8


def test_a_dense_model_too(toy_folders: dict[str, Path]) -> None:
    policy = made(toy_folders["qwen3"], 0.01)
    found = merge_loss.measure(policy, BF16, canary.row(policy.plan))
    wanted = by_hand(toy_folders["qwen3"], policy) | {"merge_kl": kl_by_hand(toy_folders["qwen3"], policy)}
    assert found == pytest.approx(wanted, rel=1e-2)


def test_the_divergence_is_from_the_adapter_to_the_merged() -> None:
    one, two = (torch.tensor([[p, 1 - p], [0.5, 0.5]], dtype=torch.float64).log() for p in (0.9, 0.5))
    assert merge_loss.divergence(one, two) == pytest.approx((0.9 * math.log(1.8) + 0.1 * math.log(0.2)) / 2)


def everything(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def test_the_policy_is_left_as_it_was(toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, adapters and what a forward gives; also when a layer fails while it has other weights."""
    policy = made(toy_folders["moe"], 0.1, True)
    row = canary.row(policy.plan)
    before, addresses = everything(policy), [one.data_ptr() for one in policy.model.parameters()]
    with torch.no_grad():
        logits = policy.hidden_logits(row.tokens, row.positions, row.seen, row.rows)
    first = merge_loss.measure(policy, BF16, row)
    assert merge_loss.measure(policy, BF16, row) == first

    *others, last = policy.model.decoder.layers
    forward, calls = last.mlp.forward, []

    def fail(*args: object, **kwargs: object) -> object:
        own = {name for name, one in policy.model.named_parameters() if one.data_ptr() in addresses}
        calls.append(sum(name in own for layer in others for name in names(layer)))
        if len(calls) == 2:
            assert not names(last) & own - adapters, "the second forward is not with served weights"
            raise RuntimeError("in the merged forward")
        return forward(*args, **kwargs)

    def names(layer: torch.nn.Module) -> set[str]:
        ids = {id(one) for one in layer.parameters()}
        return {name for name, one in policy.model.named_parameters() if id(one) in ids}

    adapters = {name for name, _ in policy.model.named_parameters() if ".adapter." in name}
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="in the merged forward"):
        patched.setattr(last.mlp, "forward", fail)
        merge_loss.measure(policy, BF16, row)
    assert calls[0] == calls[1] > 0, "more than one layer was merged at a time"
    after = everything(policy)
    assert after.keys() == before.keys()
    assert not [name for name, one in before.items() if not torch.equal(one, after[name])]
    assert [one.data_ptr() for one in policy.model.parameters()] == addresses
    with torch.no_grad():
        assert torch.equal(policy.hidden_logits(row.tokens, row.positions, row.seen, row.rows), logits)


def test_an_adapter_that_changes_nothing(tmp_path: Path) -> None:
    """A bf16 base: no element changes, no KL, and no share of an update that there is not."""
    folder = toys.make(tmp_path / "toy", "qwen3_moe", dtype="bfloat16")
    policy = made(folder, 0.0)
    found = merge_loss.measure(policy, BF16, canary.row(policy.plan))
    assert set(found) == {"merge_changed", "merge_kl"} and found["merge_changed"] == 0
    assert abs(found["merge_kl"]) <= 1e-12


def test_which_jobs_have_them(toy_folders: dict[str, Path], tmp_path: Path) -> None:
    """In the manifest of a train job that is served merged in bf16; an init job has no metrics."""
    bf16 = EngineSpec(dtype="bfloat16")
    jobs = make_jobs(tmp_path / "jobs", toy_folders["llama"], engine=bf16)
    zero = jobs.do(0, None)
    one = jobs.do(1, zero)
    manifests = [
        msgspec.json.decode((Path(ref.dir) / "manifest.json").read_bytes(), type=CheckpointManifest)
        for ref in (zero, one)
    ]
    assert manifests[0].metrics == {}
    found = {name: value for name, value in manifests[1].metrics.items() if name.startswith("merge_")}
    policy, base = jobs.trainer._load_policy({}), jobs.trainer._trained.base
    assert found == merge_loss.metrics(policy, base, jobs.spec) and len(found) == 3
    assert 0 < found["merge_changed"] < 1 and 0 < found["merge_served"] < 1.5 and found["merge_kl"] > 0
    others = [
        RunSpec(model="/m"),
        RunSpec(model="/m", engine=bf16, rollout_weights_mode="lora"),
        RunSpec(model="/m", engine=bf16, parameters="full"),
    ]
    assert all(merge_loss.metrics(policy, base, spec) == {} for spec in others)
    stored = {
        "model.norm.weight": torch.ones(2, dtype=torch.float16)
    }  # not what the model holds, so not what is served
    policy.model.config.params_dtype = BF16
    assert merge_loss.metrics(policy, stored, jobs.spec) == {}
