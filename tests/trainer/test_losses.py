"""CISPO against an oracle in float64 that is written token by token; normalisation; metrics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.step import losses
from artd_workers.trainer.step.objective import Objective, shares
from artd_workers.trainer.step.step import Cancelled, NonFinite, Optimizer, train_step

from . import rig
from .rig import Piece

pytestmark = pytest.mark.torch


def make_batch(advantages: tuple[float, ...] = (1.5, -0.5, -1.0)) -> Batch:
    """Two rows: three trajectories of 6, 11 and 3 trained tokens."""
    generator = torch.Generator().manual_seed(11)

    def ids(n: int) -> Tensor:
        return torch.randint(3, 1024, (n,), generator=generator)

    prompt = ids(8)
    first = [
        Piece(prompt),
        Piece(ids(7), 0, trained_from=1, advantage=advantages[0], temperature=0.5),
        Piece(ids(12), 0, trained_from=1, advantage=advantages[1]),
    ]
    rows = [rig.row_columns(first, 40), rig.row_columns([Piece(ids(9), None, 6, advantages[2])], 40)]
    rows[1]["trajectory_index"][rows[1]["trajectory_index"] == 0] = 2
    for row in rows:
        trained = row["loss_mask"].bool()
        row["old_logprobs"][trained] = -8 * torch.rand(int(trained.sum()), generator=generator)
        row["weights"][trained] = 0.5 + torch.rand(int(trained.sum()), generator=generator)
    return rig.batch_of(rows, 3)


def oracle(batch: Batch, logprobs: list[Tensor], spec: LossSpec) -> Tensor:
    """The loss in float64, straight from the definition."""
    sums = {t: [] for t in range(3)}
    for row, values in zip(batch.rows, logprobs, strict=True):
        for i, logp in enumerate(values):
            rho = math.exp(float(logp.detach()) - float(row.old_logprobs[i]))
            clipped = min(max(rho, 0.0), float(spec.clip_high or 0))
            term = -clipped * float(row.advantages[i]) * float(row.weights[i]) * logp
            sums[int(row.trajectories[i])].append(term)
    if spec.normalise == "token":
        return sum(sum(terms) for terms in sums.values()) / sum(map(len, sums.values()))
    return sum(sum(terms) / len(terms) for terms in sums.values()) / len(sums)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("clip_high", [5.0, 0.3])
def test_cispo_and_its_gradient(normalise: str, clip_high: float) -> None:
    batch, spec = make_batch(), LossSpec(normalise=normalise, clip_high=clip_high)
    generator = torch.Generator().manual_seed(12)
    logprobs = [(-8 * torch.rand(len(row.at), generator=generator)).requires_grad_() for row in batch.rows]
    share, cispo = shares(batch, normalise), Objective(spec)
    found = sum(cispo.row_loss(row, v, share, batch.sequences)[0] for row, v in zip(batch.rows, logprobs, strict=True))
    exact = [values.detach().double().requires_grad_() for values in logprobs]
    wanted = oracle(batch, exact, spec)
    assert abs(found.item() - wanted.item()) <= 1e-6
    for a, b in zip(torch.autograd.grad(found, logprobs), torch.autograd.grad(wanted, exact), strict=True):
        assert rig.relative(a, b) <= 1e-5
    ratios = torch.cat([losses.ratio(v, r.old_logprobs) for v, r in zip(logprobs, batch.rows, strict=True)])
    assert (ratios > clip_high).any() and (ratios < clip_high).any(), "the clip decides nothing here"


def test_the_step_follows_the_oracle(folder: Path) -> None:
    """Loss and gradient through the whole model, and the loss does not depend on the order of rows."""
    policy, batch, spec = rig.make_policy(folder), make_batch(), LossSpec()
    exact = []
    for row in batch.rows:
        exact.append(
            policy.score(row.tokens, row.positions, row.hidden_from, row.at, row.targets, row.temperatures).logprobs
        )
    wanted = oracle(batch, exact, spec)
    grads = torch.autograd.grad(wanted, policy.lora.parameters())
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    metrics = train_step(policy, Optimizer.make(policy.lora, OptimizerSpec(lr=0.0)), batch, spec, 0)
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    turned = Batch(batch.manifest, batch.sha, batch.rows[::-1], batch.counts)
    again = train_step(policy, Optimizer.make(policy.lora, OptimizerSpec(lr=0.0)), turned, spec, 0)
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-6)


def test_adamw_and_clip_by_hand(toy_folders: dict[str, Path]) -> None:
    """First step: m = (1 - b1) g, v = (1 - b2) g^2, p -= lr (m^ / (sqrt(v^) + eps) + wd p), g clipped to norm 0.01."""
    policy, batch = rig.make_policy(toy_folders["llama"]), make_batch()
    spec = OptimizerSpec(lr=0.01, weight_decay=0.1, clip_grad_norm=0.01)
    before = {n: p.detach().clone() for n, p in policy.lora.list_parameters()}
    parts = []
    share = shares(batch, "token")
    for row in batch.rows:
        scores = policy.score(row.tokens, row.positions, row.hidden_from, row.at, row.targets, row.temperatures)
        parts.append(Objective(LossSpec()).row_loss(row, scores.logprobs, share, batch.sequences)[0])
    grads = dict(zip(before, torch.autograd.grad(sum(parts), policy.lora.parameters()), strict=True))
    optimizer = Optimizer.make(policy.lora, spec)
    norm = train_step(policy, optimizer, batch, LossSpec(), 0)["grad_norm"]
    assert norm > 0.01
    for name, parameter in policy.lora.list_parameters():
        g = grads[name].double() * 0.01 / norm
        wanted = before[name].double() * (1 - 0.01 * 0.1) - 0.01 * g / (g.abs() + spec.eps)
        assert (parameter - wanted).abs().max() <= 1e-6
    state = optimizer.state()
    assert int(state["step"]) == 1 and len(state) == 2 * len(before) + 1


def broken_state(folder: Path, batch: Batch, error: type[Exception], **kwargs: object) -> None:
    """A step that raises must leave adapter and optimizer as they were."""
    policy = rig.make_policy(folder)
    optimizer = Optimizer.make(policy.lora, OptimizerSpec(lr=0.1))
    train_step(policy, optimizer, make_batch(), LossSpec(), 0)
    adapter = {n: t.clone() for n, t in policy.lora.state().items()}
    moments = {n: t.clone() for n, t in optimizer.state().items()}
    with pytest.raises(error):
        train_step(policy, optimizer, batch, LossSpec(), 0, **kwargs)
    assert all(torch.equal(t, adapter[n]) for n, t in policy.lora.state().items())
    assert all(torch.equal(t, moments[n]) for n, t in optimizer.state().items())
    assert all(p.grad is None for p in policy.lora.parameters())


def test_a_non_finite_loss_changes_nothing(toy_folders: dict[str, Path]) -> None:
    broken_state(toy_folders["llama"], make_batch((3e38, -0.5, -3e38)), NonFinite)


def test_a_non_finite_gradient_changes_nothing(toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("artd_workers.trainer.model.lora.gradient_norm", lambda _: float("inf"))
    policy = rig.make_policy(toy_folders["llama"])
    optimizer = Optimizer.make(policy.lora, OptimizerSpec(lr=0.1))
    adapter = {n: t.clone() for n, t in policy.lora.state().items()}
    with pytest.raises(NonFinite):
        train_step(policy, optimizer, make_batch(), LossSpec(), 0)
    assert all(torch.equal(t, adapter[n]) for n, t in policy.lora.state().items())
    assert int(optimizer.state()["step"]) == 0


def test_a_cancel_changes_nothing(toy_folders: dict[str, Path]) -> None:
    asked = iter([False, True])
    broken_state(toy_folders["llama"], make_batch(), Cancelled, cancelled=lambda: next(asked))


def test_metrics(toy_folders: dict[str, Path]) -> None:
    """Ratios, k3, entropy and mismatch against their definitions in float64."""
    policy, batch = rig.make_policy(toy_folders["llama"]), make_batch()
    batch.rows[0].epochs[:4] = 3
    batch.rows[0].epochs[4:] = 2
    batch.rows[1].epochs[:] = -1
    new, old, entropy = [], [], []
    for row in batch.rows:
        with torch.no_grad():
            logits = policy.hidden_logits(row.tokens, row.positions, row.hidden_from, row.at).double()
        p = (logits / row.temperatures.double()[:, None]).softmax(-1)
        entropy.append(-(p * p.log()).sum(-1))
        new.append(p.log().gather(-1, row.targets[:, None])[:, 0])
        old.append(row.old_logprobs.double())
    n, o = torch.cat(new), torch.cat(old)
    ratios = (n - o).exp()
    found = train_step(policy, Optimizer.make(policy.lora, OptimizerSpec()), batch, LossSpec(clip_high=1.0), 3)
    wanted = {
        "ratio_mean": ratios.mean(), "kl_k3": (ratios - 1 - (n - o)).mean(), "clipped_fraction": (ratios > 1).double().mean(),
        "entropy": torch.cat(entropy).mean(), "trained_tokens": 20, "mismatch_tokens": 4,
        "mismatch_mae": (n - o)[:4].abs().mean(), "mismatch_max": (n - o)[:4].abs().max(),
        "mismatch_mean_abs_pct": 100 * (n - o)[:4].abs().mean() / o[:4].abs().mean(),
        "ratio_p95": ratios.sort().values[18], "ratio_p99": ratios.sort().values[19],
        "staleness_max": 1, "staleness_mean": 13 / 17,
    }  # fmt: skip
    for name, value in wanted.items():
        assert found[name] == pytest.approx(float(value), rel=1e-4), name
