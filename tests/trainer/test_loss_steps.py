"""One real step of each loss against plain transformers in fp64 and the oracle: its loss, and its gradient of every weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from artd_schema.losses import OWN
from artd_schema.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.parameters.trained import FullState
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rig
from .loss_oracle import Seq, Setting, batch_loss
from .rig import Piece

pytestmark = pytest.mark.torch
PROMPT, SIZES, ADVANTAGES = 12, (9, 14, 5), (1.2, -0.4, -0.8)


def make_batch(folder: Path) -> tuple[Batch, list[Tensor]]:
    """A tree of two answers and a row of one, whose old logprobs are a few steps from the model's own; and the plain sequences."""
    generator, hf = torch.Generator().manual_seed(21), rig.reference(folder, torch.float64)
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
