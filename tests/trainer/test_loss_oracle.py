"""Every loss against the oracle in fp64: value and gradient, in whatever rows the sequences lie, and on however many ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced

from artd_schema.run.losses import OWN
from artd_schema.run.spec import CorrectionSpec, KlSpec, LossSpec
from artd_workers.trainer.step.objective import Objective, shares

from . import loss_rig
from .loss_oracle import Setting, batch_loss, weights_of

pytestmark = pytest.mark.torch


def same(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


NUMBERS: dict[str, dict[str, float]] = {
    "cispo": {"clip_high": 1.5},
    "ppo": {"clip_low": 0.3, "clip_high": 0.4, "dual_clip": 1.8},
    "grpo": {"clip_low": 0.3, "clip_high": 0.4},
    "dr_grpo": {"clip_low": 0.3, "clip_high": 0.4},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "importance_sampling": {},
    "reinforce": {},
    "sft": {},
}


def spec_of(kind: str, normalise: str, divisor: int = 12) -> LossSpec:
    numbers = NUMBERS[kind]
    fields: dict[str, Any] = {name: numbers[name] for name in ("clip_low", "clip_high") if name in numbers}
    if params := {name: value for name, value in numbers.items() if name not in fields}:
        fields["params"] = params
    return LossSpec(kind=kind, normalise=normalise, divisor=divisor, **fields)


def setting_of(spec: LossSpec) -> Setting:
    return Setting(spec.kind, spec.normalise, float(spec.divisor or 1), NUMBERS[spec.kind])


def test_each_loss_is_tried_here() -> None:
    assert NUMBERS.keys() == OWN.keys()


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_a_loss_and_its_gradient(kind: str, normalise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(spec_of(kind, normalise), setting_of(spec_of(kind, normalise)), monkeypatch)


def compare(spec: LossSpec, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss and gradients in any rows and over two ranks as the oracle's."""
    random = np.random.default_rng(len(spec.kind))
    for _ in range(3):
        found = loss_rig.sequences(random)
        wanted, slopes = batch_loss(found, setting)
        for rows in loss_rig.packings(random, len(found)):
            batch, values = loss_rig.batch_of(found, rows)
            beside = loss_rig.besides(found, rows)
            loss, gradients = loss_rig.computed(spec, batch, values, beside)
            same(loss, wanted)
            for ours, theirs in zip(loss_rig.by_sequence(rows, found, gradients), slopes, strict=True):
                same(ours, theirs)
        cuts = [int(random.integers(0, len(value) + 1)) for value in values]
        with monkeypatch.context() as patch:
            loss, gradients = loss_rig.over_two_ranks(spec, batch, values, beside, cuts, patch)
        same(loss, wanted)
        for ours, theirs in zip(loss_rig.by_sequence(rows, found, gradients), slopes, strict=True):
            same(ours, theirs)


MASKS: dict[str, tuple[float, float]] = {"icepop": (0.6, 1.6), "product": (0.4, 2.5), "geometric": (0.9, 1.12)}


@pytest.mark.parametrize("proximal", ["engine", "trainer"])
@pytest.mark.parametrize("mask", [*MASKS, "all"])
def test_masks(mask: str, proximal: Literal["engine", "trainer"], monkeypatch: pytest.MonkeyPatch) -> None:
    masks = MASKS if mask == "all" else {mask: MASKS[mask]}
    spec = replaced(spec_of("ppo", "token"), proximal=proximal, correction=CorrectionSpec(**masks))
    compare(spec, dataclasses.replace(setting_of(spec), proximal=proximal, masks=masks), monkeypatch)


@pytest.mark.parametrize(("kind", "proximal"), [("reinforce", "engine"), ("ppo", "trainer"), ("gspo", "trainer")])
def test_truncated_importance_sampling(
    kind: str, proximal: Literal["engine", "trainer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replaced(spec_of(kind, "sequence"), proximal=proximal, correction=CorrectionSpec(tis=1.3))
    compare(spec, dataclasses.replace(setting_of(spec), proximal=proximal, tis=1.3), monkeypatch)


@pytest.mark.parametrize("kind", ["cispo", "ppo", "importance_sampling"])
def test_decoupled_ratios(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replaced(spec_of(kind, "token"), proximal="trainer")
    compare(spec, dataclasses.replace(setting_of(spec), proximal="trainer"), monkeypatch)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("into", ["loss", "advantage"])
def test_kl_to_the_base_model(estimator: Any, into: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask beside it: what a mask leaves out is held to the base model all the same."""
    masks = {"icepop": MASKS["icepop"]}
    kl = KlSpec(coef=0.3, estimator=estimator, into=into)
    spec = replaced(spec_of("grpo", "sequence"), kl=kl, correction=CorrectionSpec(**masks))
    compare(spec, dataclasses.replace(setting_of(spec), kl=(0.3, estimator, into), masks=masks), monkeypatch)


def test_an_entropy_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replaced(spec_of("cispo", "sequence"), entropy_bonus=0.07)
    compare(spec, dataclasses.replace(setting_of(spec), entropy_bonus=0.07), monkeypatch)
    found = loss_rig.sequences(np.random.default_rng(1))
    batch, values = loss_rig.batch_of(found, [range(len(found))])
    (beside,) = loss_rig.besides(found, [range(len(found))])
    share, row = shares(batch, "sequence"), batch.rows[0]
    loss, _ = Objective(spec).row_loss(row, values[0], share, batch.sequences, beside)
    assert beside.entropy is not None
    same(torch.autograd.grad(loss, beside.entropy)[0], -0.07 * row.weights * share[row.trajectories])


def test_metrics_of_corrections_and_penalties() -> None:
    masks = MASKS
    spec = replaced(
        spec_of("ppo", "token"),
        proximal="trainer",
        correction=CorrectionSpec(**masks),
        kl=KlSpec(coef=0.1, estimator="k2"),
    )
    found = loss_rig.sequences(np.random.default_rng(7), trajectories=8)
    batch, values = loss_rig.batch_of(found, [range(len(found))])
    (beside,) = loss_rig.besides(found, [range(len(found))])
    _, metrics = Objective(spec).row_loss(batch.rows[0], values[0], shares(batch, "token"), batch.sequences, beside)
    setting = dataclasses.replace(setting_of(spec), proximal="trainer", masks=masks)
    weight = np.concatenate([weights_of(one, setting) for one in found])
    distance = np.concatenate([(one.new - one.base) ** 2 / 2 for one in found])
    told = {name: float(mean.total) for name, mean in metrics.items()}
    same(told["correction_mean"], weight.sum())
    same(told["kl_reference"], distance.sum())
    assert 0 < told["correction_masked_fraction"] == (weight == 0).sum() < len(weight)


@pytest.mark.parametrize("kind", ["ppo", "grpo", "dr_grpo", "gspo"])
def test_clip_metrics(kind: str) -> None:
    """A token counts as clipped exactly where the oracle's slope is 0, at the bound that its advantage's sign names."""
    spec, random = spec_of(kind, "token"), np.random.default_rng(5)
    found = loss_rig.sequences(random, spread=0.8, trajectories=8)
    batch, values = loss_rig.batch_of(found, [range(len(found))])
    share = shares(batch, "token")
    _, metrics = Objective(spec).row_loss(batch.rows[0], values[0], share, batch.sequences)
    told = {name: float(mean.total) for name, mean in metrics.items()}
    ratios = [np.exp(one.new - one.old) for one in found]
    if kind == "gspo":
        ratios = [np.full(len(r), np.exp(np.mean(np.log(r)))) for r in ratios]
    r, a = np.concatenate(ratios), np.concatenate([one.advantages for one in found])
    numbers = NUMBERS[kind]
    low, high = (a < 0) & (r < 1 - numbers["clip_low"]), (a > 0) & (r > 1 + numbers["clip_high"])
    wanted = {
        "clipped_low_fraction": low.sum(),
        "clipped_high_fraction": high.sum(),
        "clipped_fraction": (low | high).sum(),
    }
    if kind == "ppo":
        wanted["dual_clipped_fraction"] = ((a < 0) & (r > numbers["dual_clip"])).sum()
    assert told == wanted and all(wanted.values())


def test_what_is_not_trained_has_no_share() -> None:
    """A trajectory without a trained token counts in no mean over trajectories."""
    found = loss_rig.sequences(np.random.default_rng(2), trajectories=3)
    batch, _ = loss_rig.batch_of(found, [range(len(found))])
    counts = torch.cat([batch.counts, torch.zeros(1, dtype=torch.int64)])
    for normalise in ("sequence", "constant"):
        share = shares(replace(batch, counts=counts), normalise, 7.0).tolist()
        assert share == [*shares(batch, normalise, 7.0).tolist(), 0.0]
