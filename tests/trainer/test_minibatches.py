"""Several optimizer steps for a batch: against plain transformers, and a job that ends between two of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from artd_schema.run.spec import CorrectionSpec, Learning, LossSpec, OptimizerSpec, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.trainer.batch.rows import Batch, BatchError, make_batch
from artd_workers.trainer.step.job import train_job
from artd_workers.trainer.step.step import Cancelled, Optimizer
from artd_workers.trainer.trainer import Trainer

from . import rig
from .jobs import files_in, spec_for
from .rig import Piece

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
PROMPT, SIZES, ADVANTAGES, PARTS = 10, (9, 12, 6, 8), (1.2, -0.4, -0.8, 0.7), (0, 0, 1, 1)
LR, CLIP, MASK = 0.02, (0.2, 0.28), (0.6, 1.8)


def make(folder: Path) -> tuple[Batch, list[Tensor], list[Tensor]]:
    """Four sequences in rows of their own, two minibatches; the sequences, and the engine's logprobs, which are not the model's."""
    generator, hf = torch.Generator().manual_seed(5), rig.reference(folder)
    sequences = [torch.randint(3, 1024, (PROMPT + size,), generator=generator) for size in SIZES]
    rows, engine = [], []
    for index, (tokens, advantage) in enumerate(zip(sequences, ADVANTAGES, strict=True)):
        with torch.no_grad():
            own = rig.hf_logprobs(hf, tokens)[PROMPT - 1 :]
        engine.append((own + 0.4 * torch.randn(len(own), generator=generator)).clamp(max=-0.01))
        row = rig.row_columns([Piece(tokens, None, PROMPT, advantage)], 24, engine[-1])
        row["trajectory_index"][row["trajectory_index"] == 0] = index
        rows.append(row)
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    manifest = msgspec.structs.replace(rig.manifest_of(columns, len(rows)), minibatches=PARTS, seed=3)
    return make_batch(columns, manifest, "0" * 64, 1024), sequences, engine


def drawn_order(epoch: int, seed: int = 3, step: int = 1) -> list[int]:
    if not epoch:
        return [0, 1]
    return sorted((0, 1), key=lambda part: hashlib.sha256(f"{seed}:{step}:{epoch}:{part}".encode()).hexdigest())


def objective(new: Tensor, before: Tensor, engine: Tensor, advantage: float) -> Tensor:
    """PPO with its ratio to the weights before the job, masked and weighed by these against the engine's; a sum over tokens."""
    ratio, k = (new - before).exp(), (before - engine).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantage)
    gain = gain if advantage > 0 else gain.clamp(min=3 * advantage)
    return -(gain * k * ((k >= MASK[0]) & (k <= MASK[1]))).sum()


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_minibatch_is_a_step_of_transformers(toy_folders: dict[str, Path], epochs: int) -> None:
    """In the order that the seed draws, each divided by its own tokens, the ratio of all to the weights before the job."""
    folder = toy_folders["tied"]
    batch, sequences, engine = make(folder)
    loss = LossSpec(kind="ppo", proximal="trainer", correction=CorrectionSpec(icepop=MASK))
    spec = OptimizerSpec(lr=LR, eps=1e-3, clip_grad_norm=0.0, minibatches=2, epochs=epochs)
    policy, state = rig.full_policy(folder)
    optimizer = Optimizer.make(state, spec)
    metrics = train_job(policy, optimizer, batch, Learning(optimizer=spec, loss=loss), 0)

    hf, losses = rig.reference(folder), []
    theirs = torch.optim.AdamW(hf.parameters(), lr=LR, eps=1e-3, betas=(spec.beta1, spec.beta2), weight_decay=0.0)
    with torch.no_grad():
        before = [rig.hf_logprobs(hf, tokens)[PROMPT - 1 :] for tokens in sequences]
    orders = [drawn_order(epoch) for epoch in range(epochs)]
    assert epochs == 1 or [1, 0] in orders, "a seed that never turns the order shows nothing"
    for part in (part for order in orders for part in order):
        own = [index for index in range(4) if PARTS[index] == part]
        new = {index: rig.hf_logprobs(hf, sequences[index])[PROMPT - 1 :] for index in own}
        total = sum(objective(new[i], before[i], engine[i], ADVANTAGES[i]) for i in own) / sum(SIZES[i] for i in own)
        theirs.zero_grad()
        total.backward()
        theirs.step()
        losses.append(total.item())
    wanted = rig.per_expert({name: parameter.detach() for name, parameter in hf.named_parameters()})
    assert max(float((tensor - wanted[name]).abs().max()) for name, tensor in state.state().items()) <= 1e-5
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert (metrics["optimizer_steps"], metrics["trained_tokens"]) == (2 * epochs, sum(SIZES))
    assert optimizer.updates == 2 * epochs


def test_a_batch_with_another_division_than_its_manifest_says_is_refused(toy_folders: dict[str, Path]) -> None:
    batch = make(toy_folders["tied"])[0]
    assert [len(part.rows) for part in batch.minibatches()] == [2, 2]
    assert [int(part.counts.sum()) for part in batch.minibatches()] == [21, 14]
    assert [part.sequences for part in batch.minibatches()] == [2, 2]
    columns = {name: torch.zeros((4, 24), dtype=info[1]) for name, info in _columns().items()}
    for parts in ((0, 1), (1, 0, 1, 1)):
        with pytest.raises(BatchError, match="minibatches"):
            make_batch(columns, msgspec.structs.replace(batch.manifest, minibatches=parts), "0" * 64, 1024)


def _columns() -> dict[str, tuple[str, torch.dtype]]:
    return {name: (name, dtype) for name, dtype in rig.DTYPES.items()}


def train(root: Path, spec: RunSpec, files: dict[str, Any], stopped: bool) -> dict[str, bytes]:
    """Commit step 0 and train step 1, in one process; the files of step 1. stopped: a first attempt ends after one optimizer step."""
    root.mkdir()
    trainer = Trainer(TrainerConfig(run="r", spec=spec, base_digest="base"), {})
    init = w.Run(job=1, fence=1, kind="init", step=0, epoch=0, lineage=0, dir=str(root / "0"), instance="i")
    ref = w.CheckpointRef(run="r", step=0, epoch=0, lineage=0, sha=trainer.run(init).sha, dir=init.dir)
    trainer.mark_committed(ref, 1)
    order = msgspec.structs.replace(
        init, job=2, kind="train", step=1, epoch=1, dir=str(root / "1"), parent=ref, **files
    )
    if stopped:
        with pytest.raises(Cancelled):
            trainer.run(order, cancelled=lambda: trainer._optimizer.updates > 0)
        assert trainer._optimizer.updates == 1
    trainer.run(order)
    torch.use_deterministic_algorithms(False)
    return files_in(root / "1")


def test_a_job_that_ends_between_two_steps_is_done_again_as_a_whole(
    tmp_path: Path, toy_folders: dict[str, Path]
) -> None:
    """Nothing of the first step is left: the next attempt gives the bits of a trainer that was never stopped."""
    spec = spec_for(toy_folders["llama"])
    steps = msgspec.structs.replace(spec.optimizer, minibatches=2, epochs=2)
    learning = Learning(optimizer=steps, loss=spec.loss)
    batch = rig.write_batch(tmp_path / "batch", 1, learning=learning)
    files = {"batch": str(batch.tensors), "manifest": str(batch.manifest), "batch_sha": batch.sha, "learning": learning}
    found = [train(tmp_path / str(stopped), spec, files, stopped) for stopped in (False, True)]
    assert found[0] == found[1]


def test_minibatches_keep_sequences_apart(toy_folders: dict[str, Path]) -> None:
    """One minibatch is the batch itself."""
    batch = make(toy_folders["tied"])[0]
    whole = replace(batch, parts=())
    assert whole.minibatches() == [whole]
