"""Every loss against the oracle in fp64: value and gradient, in whatever rows the sequences lie, and on however many ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from artd_schema.losses import OWN
from artd_schema.spec import LossSpec
from artd_workers.trainer.step.objective import Objective, shares

from . import loss_rig
from .loss_oracle import Setting, batch_loss

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
    random, spec = np.random.default_rng(len(kind)), spec_of(kind, normalise)
    for _ in range(3):
        found = loss_rig.sequences(random)
        wanted, slopes = batch_loss(found, setting_of(spec))
        for rows in loss_rig.packings(random, len(found)):
            batch, values = loss_rig.batch_of(found, rows)
            loss, gradients = loss_rig.computed(spec, batch, values)
            same(loss, wanted)
            for ours, theirs in zip(loss_rig.by_sequence(rows, found, gradients), slopes, strict=True):
                same(ours, theirs)
        cuts = [int(random.integers(0, len(value) + 1)) for value in values]
        with monkeypatch.context() as patch:
            loss, gradients = loss_rig.over_two_ranks(spec, batch, values, cuts, patch)
        same(loss, wanted)
        for ours, theirs in zip(loss_rig.by_sequence(rows, found, gradients), slopes, strict=True):
            same(ours, theirs)


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
