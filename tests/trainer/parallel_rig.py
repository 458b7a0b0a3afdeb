"""A run's first jobs, by one process or by several: base model, batches with routes, checkpoints, and the differences between
them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from artd_schema.codec import digest
from artd_schema.data.manifest import CheckpointManifest
from artd_schema.run.spec import LoraSpec, OptimizerSpec, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.trainer.checkpoint import canary, merge_loss
from artd_workers.trainer.parallel.ranks import Ranks
from artd_workers.trainer.trainer import Order, Trainer

from . import moe_rig, rig, test_replay_train

ALONE = "alone"
CHUNK = 8
"""Tokens whose logits a rank has at once: fewer than any row trains."""
GROUPS = 3
"""Rows of a batch: an odd number, so that two ranks that share rows out have one over."""


def spec_of(base: Path, **changes: Any) -> RunSpec:
    spec = RunSpec(
        model=str(base),
        seed=3,
        threads=1,
        row_length=128,
        lora=LoraSpec(rank=4, alpha=8),
        optimizer=OptimizerSpec(lr=0.01),
    )
    return msgspec.structs.replace(spec, **changes)


def prepare(folder: Path) -> None:
    """Write base model and batches."""
    moe_rig.folder(folder / "base")
    for step in (1, 2):
        written = test_replay_train.write(folder / f"batch-{step}", step, GROUPS)
        (folder / f"batch-{step}.json").write_text(json.dumps(test_replay_train.job_files(written)))


class Jobs:
    """A trainer and its checkpoints. given: the folder that `prepare` filled; name: of the folder in it for the checkpoints;
    changes: of the spec."""

    def __init__(self, given: Path, name: str, ranks: Ranks | None = None, **changes: Any) -> None:
        self.given, self.out = given, given / name
        self.out.mkdir(exist_ok=True)
        self.trainer = Trainer(
            TrainerConfig(run="r", spec=spec_of(given / "base", **changes), base_digest="base"), {}, ranks
        )

    def straight(self) -> list[dict[str, float]]:
        """Init, and two steps out of memory; metrics of each."""
        return [self.run(0, "0"), self.run(1, "1", self.out / "0"), self.run(2, "2", self.out / "1")]

    def run(
        self,
        step: int,
        name: str,
        parent: Path | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        **change: str,
    ) -> dict[str, float]:
        """Do a job and commit it; its metrics."""
        files = json.loads((self.given / f"batch-{step}.json").read_text()) | change if step else {}
        ref = _ref(parent, step - 1) if parent else None
        job = w.Run(job=step + 1, fence=1, kind="train" if step else "init", step=step, epoch=step, lineage=0,
                    dir=str(self.out / name), instance="i", parent=ref, **files)  # fmt: skip
        staged = self.trainer.run(job, cancelled=cancelled)
        self.trainer.mark_committed(_ref(self.out / name, step), 1)
        return staged.metrics

    def rounding(self) -> dict[str, float]:
        """What merging an adapter in bf16 would lose, together; `room`: what a bf16 engine's canary is granted, in the mean."""
        policy = self.trainer._policy
        assert policy is not None
        asked = canary.row(policy.plan)
        _largest, room = canary.room(
            policy, canary.measure_rounding(policy, asked, canary.logprobs(policy, asked), torch.bfloat16)
        )
        lost = {} if policy.lora is None else merge_loss.measure(policy, torch.bfloat16, asked)
        return lost | {"room": room}

    def elements(self) -> int:
        """How many numbers this process's optimizer steps."""
        return sum(parameter.numel() for parameter in self.trainer._optimizer.parameters)

    def followed(self, orders: int, unreadable: int = -1) -> list[str]:
        """On another rank: as many jobs as rank 0 leads; what was raised. unreadable: the job whose batch this rank cannot read."""
        raised = []
        for number in range(orders):
            order = msgspec.msgpack.decode(self.trainer.ranks.receive_order(), type=Order)
            try:
                with pytest.MonkeyPatch.context() as patch:
                    if number == unreadable:
                        patch.setattr(self.trainer, "_read_batch", _unreadable)
                    self.trainer.follow(order)
            except Exception as error:
                raised.append(repr(error))
                assert not self.trainer.ranks.broken, error
        return raised


def _unreadable(*_: object) -> None:
    raise OSError("no such mount")


def _ref(folder: Path, step: int) -> w.CheckpointRef:
    sha = digest((folder / "manifest.json").read_bytes())
    return w.CheckpointRef(run="r", step=step, epoch=step, lineage=0, sha=sha, dir=str(folder))


def apart(one: Path, two: Path) -> dict[str, float]:
    """Largest relative difference of a tensor, for each file of two checkpoints, and of the canary in nats."""
    found = {}
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(one / name), load_file(two / name)
        assert list(ours) == list(theirs)
        found[name.split("_")[0].split(".")[0]] = max(
            rig.relative(ours[key].float(), theirs[key].float()) for key in ours
        )
    canaries = [manifest(folder).canary for folder in (one, two)]
    pairs = zip(*(sum(canary.logprobs, ()) for canary in canaries), strict=True)
    return found | {"canary": max(abs(a - b) for a, b in pairs)}


def manifest(folder: Path) -> CheckpointManifest:
    return msgspec.json.decode((folder / "manifest.json").read_bytes(), type=CheckpointManifest)
