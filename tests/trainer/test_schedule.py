"""The learning rate of each step against torch's own schedulers, and real steps with it against transformers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from msgspec import UNSET
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from artd_schema.run.spec import LossSpec, OptimizerSpec, ScheduleSpec
from artd_workers.trainer.parameters.trained import FullState
from artd_workers.trainer.step.objective import Objective, shares
from artd_workers.trainer.step.schedule import learning_rate
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rig
from .past_rig import Past, make_dense
from .test_full import make_batch

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
LR = 0.004


def torch_schedule(optimizer: torch.optim.Optimizer, spec: ScheduleSpec) -> LRScheduler:
    """torch's schedulers for the same schedule: one for the warm-up, one for what follows."""
    last = (spec.steps or 10**6) - spec.warmup
    later: LRScheduler
    match spec.kind:
        case "linear":
            later = LinearLR(optimizer, start_factor=1.0, end_factor=max(spec.floor, 1e-300), total_iters=last)
        case "cosine":
            later = CosineAnnealingLR(optimizer, T_max=last, eta_min=spec.floor * LR)
        case _:
            later = ConstantLR(optimizer, factor=1.0)
    if not spec.warmup:
        return later
    first = LinearLR(optimizer, start_factor=1 / (spec.warmup + 1), total_iters=spec.warmup)
    return SequentialLR(optimizer, [first, later], milestones=[spec.warmup])


def torch_rates(spec: ScheduleSpec, count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=LR)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its schedulers in a deprecated way
        scheduler = torch_schedule(optimizer, spec)
        for _ in range(count):
            found.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    return found


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_every_rate_is_torchs(kind: str, warmup: int, floor: float) -> None:
    falls = {"steps": 40, "floor": floor} if kind != "constant" else {}
    schedule = ScheduleSpec(kind=kind, warmup=warmup, **falls)
    ours = [learning_rate(OptimizerSpec(lr=LR, schedule=schedule), update) for update in range(1, 42)]
    assert ours == pytest.approx(torch_rates(schedule, 41), rel=1e-12, abs=1e-18)
    assert min(ours[:40]) > 0, "a step that moves nothing"
    assert max(ours) == pytest.approx(LR) and ours[warmup] == pytest.approx(LR)


def test_after_its_end_a_schedule_stays_at_the_floor() -> None:
    spec = OptimizerSpec(lr=LR, schedule=ScheduleSpec(kind="cosine", steps=10, floor=0.25))
    assert {learning_rate(spec, update) for update in (11, 12, 25, 10**9)} == {LR / 4}
    assert {learning_rate(OptimizerSpec(lr=LR), update) for update in (1, 2, 10**9)} == {LR}


def test_steps_with_a_schedule_are_transformers_steps(toy_folders: dict[str, Path]) -> None:
    """Four AdamW steps of every weight; the optimizer is read back from its state in the middle, and the schedule goes on."""
    folder, batch, loss = toy_folders["tied"], make_batch(), LossSpec()
    schedule = ScheduleSpec(kind="cosine", warmup=1, steps=5, floor=0.1)
    spec = OptimizerSpec(lr=LR, eps=1e-3, clip_grad_norm=0.0, schedule=schedule)
    policy, state = rig.full_policy(folder)
    optimizer, hf = Optimizer.make(state, spec), rig.reference(folder)
    theirs = torch.optim.AdamW(hf.parameters(), lr=LR, eps=1e-3, betas=(spec.beta1, spec.beta2), weight_decay=0.0)
    row, share, rates = batch.rows[0], shares(batch, loss.normalise), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = torch_schedule(theirs, schedule)
        for step in range(4):
            if step == 2:
                optimizer = read_back(state, spec, optimizer)
            rates.append(train_step(policy, optimizer, batch, loss, 0)["lr"])
            branches = [torch.cat([row.tokens[:12], row.tokens[12:21]]), torch.cat([row.tokens[:12], row.tokens[21:]])]
            logprobs = torch.cat([rig.hf_logprobs(hf, tokens)[12:] for tokens in branches])
            theirs.zero_grad()
            Objective(loss).row_loss(row, logprobs, share, batch.sequences)[0].backward()
            theirs.step()
            scheduler.step()
    assert rates == pytest.approx(torch_rates(schedule, 4), rel=1e-12)
    wanted = rig.per_expert({name: parameter.detach() for name, parameter in hf.named_parameters()})
    assert max(float((tensor - wanted[name]).abs().max()) for name, tensor in state.state().items()) <= 2e-6


def read_back(state: FullState, spec: OptimizerSpec, optimizer: Optimizer) -> Optimizer:
    again = Optimizer.make(state, spec)
    again.load({name: tensor.clone() for name, tensor in optimizer.state().items()})
    return again


def test_settings_that_changed_between_steps_are_those_of_a_new_optimizer(toy_folders: dict[str, Path]) -> None:
    """Rate, betas, eps and decay: bit for bit as by an optimizer that was made with them and given the moments."""
    first = OptimizerSpec(lr=0.01, weight_decay=0.1)
    second = OptimizerSpec(lr=0.002, beta1=0.7, beta2=0.8, eps=1e-4, weight_decay=0.3, clip_grad_norm=0.2)
    found = []
    for fresh in (False, True):
        policy, state = rig.full_policy(toy_folders["tied"])
        optimizer, batch = Optimizer.make(state, first), make_batch()
        train_step(policy, optimizer, batch, LossSpec(), 0)
        optimizer.spec = second
        train_step(policy, read_back(state, second, optimizer) if fresh else optimizer, batch, LossSpec(), 0)
        found.append(state.state())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory, toy_folders: dict[str, Path]) -> Past:
    return make_dense(tmp_path_factory.mktemp("past"), toy_folders["llama"])


def test_what_a_step_learnt_with_stands_in_its_manifest(past: Past) -> None:
    """And test_replay_job repeats these steps bit for bit, each from its parent's files."""
    assert [past.manifest(step).metrics["lr"] for step in (1, 2)] == [0.005, 0.02]
    assert past.manifest(2).metrics["optimizer_steps"] == 4
    found = [past.manifest(step).learning for step in range(3)]
    assert found == [UNSET, past.config.spec.learning, past.orders[2].learning]
