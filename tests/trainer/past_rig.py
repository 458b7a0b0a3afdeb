"""Runs with a history: a few steps that a trainer committed in this process, for the tests that do them again or compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec import UNSET
from safetensors.torch import load_file

from artd_schema.data.manifest import MANIFEST_FILE, CheckpointManifest
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import Learning, LoraSpec, LossSpec, OptimizerSpec, RunSpec, ScheduleSpec
from artd_schema.wire import worker as w
from artd_schema.wire.replay_job import ReplayRequest
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.models import random_moe
from artd_workers.trainer.tools import replay_job
from artd_workers.trainer.trainer import Trainer

from . import rig, routes_rig

SHAPE = RouteShape(
    layers=random_moe.CONFIG["num_hidden_layers"],
    topk=random_moe.CONFIG["num_experts_per_tok"],
    experts=random_moe.CONFIG["num_experts"],
)
Files = dict[str, str]
"""Fields of `Run` that name a batch."""


@dataclass
class Past:
    """A run `r` of three committed steps. refs: by step; orders: the jobs that made them; root: where all lies."""

    root: Path
    config: TrainerConfig
    refs: list[w.CheckpointRef]
    orders: list[w.Run]

    def request(self, step: int, target: Path) -> ReplayRequest:
        order = msgspec.structs.replace(self.orders[step], dir=str(target / "replayed"))
        return ReplayRequest(config=self.config, run=order, committed=self.refs[step])

    def manifest(self, step: int) -> CheckpointManifest:
        raw = (Path(self.refs[step].dir) / MANIFEST_FILE).read_bytes()
        return msgspec.json.decode(raw, type=CheckpointManifest)


def make_past(
    root: Path, spec: RunSpec, batch: Callable[[Path, int], Files], learning: Mapping[int, Learning] | None = None
) -> Past:
    """Three jobs by one trainer process, as the daemon orders them: from its memory, not from the parent's files; on "all
    cores" of a machine that has one. batch(folder, step): what a step is trained on. learning: what each step learns with, where not
    with the spec's."""
    past = Past(root, TrainerConfig(run="r", spec=spec, base_digest="base"), [], [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        trainer = Trainer(past.config, replay_job.versions())
    for step in range(3):
        order = w.Run(
            job=step + 1, fence=2, kind="train" if step else "init", step=step, epoch=step, lineage=0,
            dir=str(root / f"staging-{step}"), instance="i", parent=past.refs[-1] if past.refs else None,
            learning=(learning or {}).get(step, spec.learning) if step else None,
            **(batch(root / f"batch-{step}", step) if step else {}),
        )  # fmt: skip
        staged = trainer.run(order)
        target = Path(order.dir).rename(root / f"checkpoint-{step}")
        ref = w.CheckpointRef(run="r", step=step, epoch=step, lineage=0, sha=staged.sha, dir=str(target))
        trainer.mark_committed(ref, order.fence)
        past.refs.append(ref)
        past.orders.append(order)
    torch.use_deterministic_algorithms(False)  # a trainer makes its process so for good; tests share theirs
    return past


def dense_batch(folder: Path, step: int, learning: Mapping[int, Learning] | None = None) -> Files:
    batch = rig.write_batch(folder, step, epoch=step - 1, learning=(learning or {}).get(step, UNSET))
    return {"batch": str(batch.tensors), "manifest": str(batch.manifest), "batch_sha": batch.sha}


def sparse_batch(folder: Path, step: int) -> Files:
    """The same with random routes."""
    columns = load_file(rig.write_batch(folder, step, epoch=step - 1).tensors)
    columns["tokens"] %= random_moe.CONFIG["vocab_size"]
    made = routes_rig.write(folder / "replay", columns, 8, SHAPE, seed=step)
    return {
        "batch": str(made.batch), "manifest": str(made.manifest), "batch_sha": made.sha,
        "replay": str(made.replay.tensors), "replay_manifest": str(made.replay.manifest),
    }  # fmt: skip


def make_dense(root: Path, model: Path) -> Past:
    """A dense model with LoRA, whose learning rate follows a schedule; step 2 learns with values that were changed, in several
    optimizer steps."""
    lora = LoraSpec(rank=rig.RANK, alpha=rig.ALPHA)
    optimizer = OptimizerSpec(lr=0.01, schedule=ScheduleSpec(kind="linear", warmup=1, steps=4))
    spec = RunSpec(model=str(model), seed=3, lora=lora, optimizer=optimizer)
    steps = OptimizerSpec(lr=0.02, beta1=0.8, minibatches=2, epochs=2)
    changed = Learning(optimizer=steps, loss=LossSpec(kind="ppo", proximal="trainer"), version=1)
    return make_past(root, spec, partial(dense_batch, learning={2: changed}), {2: changed})


def make_sparse(root: Path) -> Past:
    """A mixture of experts of which every weight is trained, through the experts that an engine chose."""
    model = random_moe.make(root / "moe")
    spec = RunSpec(model=str(model), parameters="full", optimizer=OptimizerSpec(lr=3e-3))
    return make_past(root, spec, sparse_batch)
