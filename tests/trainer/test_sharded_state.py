"""Shared-out masters of one process that is the only one: `FullState` to the bit, and nothing left of a job that failed.

By two processes: test_sharded.py; against Megatron's own optimizer: test_sharded_megatron.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from artd_schema.run.spec import EngineSpec, LossSpec, OptimizerSpec, RunSpec
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer import placement
from artd_workers.trainer.model.model import ALONE, Policy, build
from artd_workers.trainer.parameters.full import FullState
from artd_workers.trainer.parameters.full_sharded import ShardedState
from artd_workers.trainer.placement import Placement
from artd_workers.trainer.step.step import Cancelled, Optimizer, train_step
from artd_workers.transfer.merge import BaseWeights

from .test_masters import GROUPED, make_batch

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
SPEC = OptimizerSpec(lr=0.003, clip_grad_norm=0.0)


class Rig:
    """A toy, what is trained of it, and the optimizer."""

    def __init__(self, kind: type[FullState], folder: Path, where: Placement = GROUPED) -> None:
        plan, base = plan_for(read_config(folder)), BaseWeights(folder)
        self.policy = Policy(plan, build(plan, base, ALONE, where), None)
        engine = EngineSpec(dtype=str(where.dtype).removeprefix("torch."))
        self.state = kind(self.policy, base, RunSpec(model=str(folder), parameters="full", engine=engine))
        self.state.initialise(0)
        self.optimizer = Optimizer.make(self.state, SPEC)

    def step(self) -> dict[str, float]:
        return train_step(self.policy, self.optimizer, make_batch(), LossSpec(), 0)

    def files(self) -> dict[str, Tensor]:
        """What a checkpoint holds, copied."""
        self.state.collect()
        found = self.state.state() | self.optimizer.state()
        self.state.release()
        return {name: tensor.clone() for name, tensor in found.items()}

    def load(self, files: dict[str, Tensor]) -> None:
        weights = {name: tensor for name, tensor in files.items() if name in self.state.base}
        self.state.load(weights)
        self.optimizer = Optimizer.make(self.state, SPEC)
        self.optimizer.load({name: tensor for name, tensor in files.items() if name not in weights})


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("where", [GROUPED, placement.CPU], ids=["bfloat16", "float32"])
def test_of_one_process_it_is_full_state(toy_folders: dict[str, Path], where: Placement) -> None:
    """Masters, moments, what is served, and the weights that the model computes with; and it goes on from the other's files."""
    ours, theirs = (Rig(kind, toy_folders["mixed"], where) for kind in (ShardedState, FullState))
    for _ in range(2):
        found, wanted = ours.step(), theirs.step()
        assert found["loss"] == wanted["loss"] and found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-12)
    files = ours.files()
    assert_same(files, theirs.files())
    ours.state.collect()
    assert_same(dict(ours.state.served_tensors()), dict(theirs.state.served_tensors()))
    pairs = zip(ours.policy.model.parameters(), theirs.policy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    theirs.step()
    back = Rig(ShardedState, toy_folders["mixed"], where)
    back.load(files)
    back.step()
    assert_same(back.files(), theirs.files())


def test_what_a_failed_job_left_goes_with_the_next_load(toy_folders: dict[str, Path]) -> None:
    """Sums of gradients of a step that was cancelled, and whole tensors that were collected for a checkpoint that was not written."""
    one = Rig(ShardedState, toy_folders["moe"])
    start = one.files()
    one.step()
    wanted = one.files()
    asked = iter((False, True))
    with pytest.raises(Cancelled):
        train_step(one.policy, one.optimizer, make_batch(), LossSpec(), 0, cancelled=lambda: next(asked))
    one.state.collect()
    one.load(start)
    with pytest.raises(RuntimeError, match="call collect"):
        one.state.state()
    one.step()
    assert_same(one.files(), wanted)
