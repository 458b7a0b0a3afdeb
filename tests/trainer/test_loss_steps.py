"""One real step of each loss against plain transformers in fp64 and the oracle: its loss, and its gradient of every weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from artd_schema.run.losses import OWN
from artd_schema.run.spec import CorrectionSpec, KlSpec, LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.parameters.trained import FullState
from artd_workers.trainer.step.objective import LossError
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rig
from .loss_oracle import Seq, Setting, batch_loss
from .rig import Piece

pytestmark = pytest.mark.torch
PROMPT, SIZES, ADVANTAGES = 12, (9, 14, 5), (1.2, -0.4, -0.8)


def make_batch(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[Batch, list[Tensor]]:
    """A tree of two answers and a row of one, whose old logprobs are a few steps from the model's own; and the plain sequences."""
    generator, hf = torch.Generator().manual_seed(21), rig.reference(folder, dtype)
    prompt = torch.randint(3, 1024, (PROMPT,), generator=generator)
    answers = [torch.randint(3, 1024, (size,), generator=generator) for size in SIZES]
    first = [Piece(prompt)] + [Piece(answers[i], 0, 1, ADVANTAGES[i]) for i in (0, 1)]
    rows = [
        rig.row_columns(first, 40),
        rig.row_columns([Piece(torch.cat([prompt, answers[2]]), None, PROMPT + 1, ADVANTAGES[2])], 40),
    ]
    rows[1]["trajectory_index"][rows[1]["trajectory_index"] == 0] = 2
    sequences = [torch.cat([prompt, answer]) for answer in answers]
    with torch.no_grad():
        own = [rig.hf_logprobs(hf, tokens)[PROMPT:] for tokens in sequences]
    for row, logprobs in zip(rows, (torch.cat(own[:2]), own[2]), strict=True):
        old = logprobs + 0.5 * torch.randn(len(logprobs), generator=generator, dtype=torch.float64)
        row["old_logprobs"][row["loss_mask"].bool()] = old.clamp(max=-0.01).float()
    return rig.batch_of(rows, 3), sequences


def expected(folder: Path, batch: Batch, sequences: list[Tensor], spec: LossSpec) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient by weight) of transformers, each sequence on its own, and of the oracle."""
    hf = rig.reference(folder, torch.float64)
    logprobs = [rig.hf_logprobs(hf, tokens)[PROMPT:] for tokens in sequences]
    rows = [(row, row.trajectories == t) for row in batch.rows for t in row.trajectories.unique()]
    found = [
        Seq(
            t, new.detach().numpy(), *(x[own].double().numpy() for x in (row.old_logprobs, row.advantages, row.weights))
        )
        for t, (new, (row, own)) in enumerate(zip(logprobs, rows, strict=True))
    ]
    numbers = {name: getattr(spec, name) for name in ("clip_low", "clip_high") if getattr(spec, name)}
    setting = Setting(spec.kind, spec.normalise, float(spec.divisor or 1), numbers | {"dual_clip": 3.0})
    loss, slopes = batch_loss(found, setting)
    torch.autograd.backward(logprobs, [torch.from_numpy(np.asarray(slope)) for slope in slopes])
    return loss, rig.per_expert({name: p.grad for name, p in hf.named_parameters()})


def stepped(folder: Path, batch: Batch, spec: LossSpec) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, gradient by weight) of artd's step."""
    policy, state = rig.full_policy(folder)
    optimizer, found = Optimizer.make(state, OptimizerSpec(clip_grad_norm=0.0)), {}
    optimizer.step = lambda: found.update(gradients(state))
    return train_step(policy, optimizer, batch, spec, 0), found


def gradients(state: FullState) -> dict[str, Tensor]:
    return {
        name: tensor.clone() for name, tensor in state.outward({n: p.grad for n, p in state.list_parameters()}).items()
    }


def compare(folder: Path, spec: LossSpec, loss_error: float, gradient_error: float) -> dict[str, float]:
    batch, sequences = make_batch(folder)
    loss, wanted = expected(folder, batch, sequences, spec)
    metrics, found = stepped(folder, batch, spec)
    assert abs(metrics["loss"] - loss) <= loss_error
    assert found.keys() == wanted.keys()
    ours, theirs = (torch.cat([t[name].flatten().double() for name in wanted]) for t in (found, wanted))
    assert theirs.norm() > 0 and rig.relative(ours, theirs) <= gradient_error
    return metrics


@pytest.mark.parametrize("kind", OWN)
def test_a_step_of_each_loss(toy_folders: dict[str, Path], kind: str) -> None:
    metrics = compare(toy_folders["tied"], LossSpec(kind=kind, divisor=30), 1e-5, 1e-5)
    clips = OWN[kind].clip_high is not None and kind != "cispo"
    assert ("clipped_fraction" in metrics) == (clips or kind == "cispo")
    assert not clips or 0 < metrics["clipped_fraction"] < 1


PENALISED = LossSpec(
    kind="ppo",
    correction=CorrectionSpec(icepop=(0.5, 2.0), geometric=(0.5, 1.5)),
    kl=KlSpec(coef=0.2, estimator="k2"),
    entropy_bonus=0.05,
)


@pytest.mark.parametrize("family", ["tied", "moe"])
def test_a_step_with_corrections_and_penalties(toy_folders: dict[str, Path], family: str) -> None:
    """Of an adapter: the base's logprobs are transformers' of the bare model, and so is what the mask lets through."""
    folder = toy_folders[family]
    batch, sequences = make_batch(folder, torch.float32)
    policy, hf = rig.make_policy(folder), rig.reference(folder)
    with torch.no_grad():
        bases = [rig.hf_logprobs(hf, tokens)[PROMPT:].double().numpy() for tokens in sequences]
    assert policy.lora is not None
    found, logprobs, entropies = [], [], []
    for row in batch.rows:
        logits = policy.hidden_logits(row.tokens, row.positions, row.until, row.at)
        logs = logits.log_softmax(-1)
        chosen, entropy = logs.gather(-1, row.targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
        for t in row.trajectories.unique().tolist():
            own = row.trajectories == t
            columns = (chosen, row.old_logprobs, row.advantages, row.weights)
            new, old, advantages, weights = (x[own].detach().double().numpy() for x in columns)
            found.append(Seq(t, new, old, advantages, weights, bases[t], entropy[own].detach().double().numpy()))
            logprobs.append(chosen[own])
            entropies.append(entropy[own])
    masks = {"icepop": (0.5, 2.0), "geometric": (0.5, 1.5)}
    numbers = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    setting = Setting("ppo", numbers=numbers, masks=masks, kl=(0.2, "k2", "loss"), entropy_bonus=0.05)
    loss, slopes = batch_loss(found, setting)
    parts = [torch.from_numpy(slope).float() for slope in slopes]
    total = sum((part * values).sum() for part, values in zip(parts, logprobs, strict=True))
    bonus = 0.05 * sum(values.sum() for values in entropies) / batch.trained
    wanted = torch.autograd.grad(total - bonus, policy.lora.parameters())
    ours: list[Tensor] = []
    optimizer = Optimizer.make(policy.lora, OptimizerSpec(clip_grad_norm=0.0))
    optimizer.step = lambda: ours.extend(p.grad.clone() for p in policy.lora.parameters())
    metrics = train_step(policy, optimizer, batch, PENALISED, 0)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5) and metrics["kl_reference"] > 1e-3
    assert 0 < metrics["correction_masked_fraction"] < 1
    joined = [torch.cat([x.flatten() for x in these]) for these in (ours, wanted)]
    assert rig.relative(*joined) <= 1e-5


def test_a_kl_without_an_adapter_is_refused(toy_folders: dict[str, Path]) -> None:
    batch, _ = make_batch(toy_folders["tied"])
    with pytest.raises(LossError, match="nothing holds the base any more"):
        stepped(toy_folders["tied"], batch, LossSpec(kl=KlSpec(coef=0.1)))
