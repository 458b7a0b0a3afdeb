"""What any loss is given: ids that the packer's batches imply, sums over sequences, parameters, and metrics that add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from artd_schema.run import losses as names
from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import read_batch
from artd_workers.trainer.step import losses
from artd_workers.trainer.step.loss_api import LossInputs, LossOutput, Mean
from artd_workers.trainer.step.objective import LossError, Objective, shares
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rig
from .rig import Piece
from .test_losses import make_batch

pytestmark = pytest.mark.torch


def gspo(inputs: LossInputs, *, clip: float = 0.2) -> LossOutput:
    """GSPO (arXiv:2507.18071, eq. 5): one ratio a sequence, the geometric mean of its tokens'."""
    count = inputs.sequence_sum(inputs.mask.float()).clamp(min=1)
    ratio = (inputs.sequence_sum(inputs.logprobs - inputs.old_logprobs) / count).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    tokens = -(ratio * inputs.advantages).minimum(bounded * inputs.advantages)
    return LossOutput(tokens, {"clipped_fraction": Mean.of(bounded != ratio), "sequence_tokens": Mean.of(count)})


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(losses.LOSSES)
    yield
    losses.LOSSES.clear()
    losses.LOSSES.update(before)


def test_the_daemon_knows_each_loss_and_its_parameters() -> None:
    assert names.LOSSES.keys() == losses.LOSSES.keys()
    for kind, parameters in names.LOSSES.items():
        spec = LossSpec(kind=kind, params=dict.fromkeys(parameters, 1.0)) if parameters else LossSpec(kind=kind)
        Objective(spec)
        with pytest.raises(LossError, match="no parameter 'no_such'"):
            Objective(LossSpec(kind=kind, params={"no_such": 1.0}))


def test_ids_of_a_packed_batch(tmp_path: Path) -> None:
    """Of a batch that the packer made: a sequence's tokens are those of one trajectory of one group, in one segment of one row; each
    sequence has a number of its own, and none is left out."""
    made = rig.write_batch(tmp_path, 1, epoch=0)
    batch = read_batch(made.tensors, made.manifest, made.sha, 1024)
    group = {member: t.group for member, t in enumerate(batch.manifest.trajectories)}
    seen: dict[int, set[tuple[int, int, int, int]]] = {}
    for index, row in enumerate(batch.rows):
        ids = zip(*(x.tolist() for x in (row.sequences, row.segments, row.trajectories, row.groups)), strict=True)
        for sequence, segment, trajectory, number in ids:
            seen.setdefault(sequence, set()).add((index, segment, trajectory, number))
    assert sorted(seen) == list(range(batch.sequences)) and batch.sequences > len(batch.rows)
    assert all(len(places) == 1 for places in seen.values())
    places = [next(iter(found)) for found in seen.values()]
    assert len({place[:2] for place in places}) == len(places), "two sequences in one segment"
    told = {(number, group[trajectory]) for _, _, trajectory, number in places}
    assert len({n for n, _ in told}) == len({g for _, g in told}) == len(told) > 1


def oracle(logprobs: list[Tensor], batch: object, clip: float) -> Tensor:
    """The same in float64, sequence by sequence: rows of `make_batch` have one for each trajectory."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, values in zip(batch.rows, logprobs, strict=True):  # type: ignore[attr-defined]
        for t in row.trajectories.unique():
            own = row.trajectories == t
            advantage, weights = row.advantages[own].double(), row.weights[own].double()
            ratio = (values[own] - row.old_logprobs[own].double()).mean().exp()
            bounded = ratio.clamp(1 - clip, 1 + clip)
            total = total - (torch.minimum(ratio * advantage, bounded * advantage) * weights).sum()
            count += int(own.sum())
    return total / count


def test_a_loss_of_sequences_and_its_gradient() -> None:
    losses.LOSSES["toy"] = gspo
    batch = make_batch()
    generator = torch.Generator().manual_seed(3)
    near = [row.old_logprobs + 0.3 * torch.randn(len(row.at), generator=generator) for row in batch.rows]
    values, exact = ([kind(x).requires_grad_() for x in near] for kind in (torch.clone, Tensor.double))
    objective = Objective(LossSpec(kind="toy", params={"clip": 0.5}))
    share = shares(batch, "token")
    found = sum(objective.row_loss(r, v, share, batch.sequences)[0] for r, v in zip(batch.rows, values, strict=True))
    wanted = oracle(exact, batch, 0.5)
    assert abs(found.item() - wanted.item()) <= 1e-6
    for a, b in zip(torch.autograd.grad(found, values), torch.autograd.grad(wanted, exact), strict=True):
        assert rig.relative(a, b) <= 1e-5


def test_a_step_with_it_reports_its_metrics(toy_folders: dict[str, Path]) -> None:
    losses.LOSSES["toy"] = gspo
    policy = rig.make_policy(toy_folders["llama"])
    metrics = train_step(policy, Optimizer.make(policy.lora, OptimizerSpec()), make_batch(), LossSpec(kind="toy"), 0)
    assert metrics["sequence_tokens"] == (6 * 6 + 11 * 11 + 3 * 3) / 20
    assert 0 <= metrics["clipped_fraction"] <= 1 and metrics["trained_tokens"] == 20


def test_a_row_that_only_keeps_step_is_masked() -> None:
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return LossOutput(inputs.logprobs)

    losses.LOSSES["spy"] = spy
    batch = rig.batch_of([rig.row_columns([Piece(torch.arange(3, 12), None, 6, 1.0)], 16)], 1)
    row, spying = batch.rows[0], Objective(LossSpec(kind="spy"))
    for one in (row, replace(row, weights=torch.zeros_like(row.weights))):
        spying.row_loss(one, torch.zeros(len(row.at)), shares(batch, "token"), batch.sequences)
    nothing, trained, kept = (inputs.mask for inputs in seen)
    assert not len(nothing) and trained.all() and not kept.any() and len(kept) == len(trained) == len(row.at)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda inputs: inputs.logprobs, "must return a LossOutput"),
        (lambda inputs: LossOutput(inputs.logprobs.sum()), "one loss for each of 0 tokens"),
        (lambda inputs: LossOutput(inputs.no_such), "AttributeError.*no_such"),
        (lambda inputs, *, needed: LossOutput(inputs.logprobs), "needs needed"),
        (lambda inputs: LossOutput(inputs.logprobs * (1 / int(inputs.mask.sum()))), "ZeroDivisionError"),
    ],
)
def test_a_loss_that_is_none_is_refused_before_a_step(function: object, says: str) -> None:
    losses.LOSSES["bad"] = function
    with pytest.raises(LossError, match=says):
        Objective(LossSpec(kind="bad"))


def test_metrics_that_come_and_go_are_refused() -> None:
    losses.LOSSES["bad"] = lambda inputs: LossOutput(
        inputs.logprobs, {"some": Mean.of(inputs.mask)} if len(inputs.mask) else {}
    )
    batch = make_batch()
    row = batch.rows[0]
    with pytest.raises(LossError, match=r"gives the metrics \['some'\], and \[\] where"):
        Objective(LossSpec(kind="bad")).row_loss(row, row.old_logprobs, shares(batch, "token"), batch.sequences)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(LossError, match="'toy' is not known to the trainer; known: .*cispo.*: install"):
        Objective(LossSpec(kind="toy"))


def test_the_api_is_imported_without_megatron() -> None:
    """Whoever writes a loss tries it beside torch alone."""
    roots = [str(Path(__file__).parents[2] / name) for name in ("schema", "workers")]
    script = (
        f"import sys; sys.path[:0] = {roots}; import artd_workers.trainer.step.losses; print('megatron' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_sequence_that_is_cut_over_ranks_is_summed_whole(tmp_path: Path) -> None:
    """Losses of two ranks that share rows add up to one process's, and so do gradients, where a rank has no token, too: in fp64, each
    loss of artd."""
    command = [sys.executable, "-m", "tests.trainer.context_child"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [*command, json.dumps({"rank": rank, "folder": str(tmp_path)})],
            cwd=Path(__file__).parents[2], env=environment, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    first, second = (json.loads(child.communicate(timeout=120)[0]) for child in children)
    for kind in names.LOSSES:
        batch, objective = make_batch(), Objective(LossSpec(kind=kind))
        one, two = first[kind], second[kind]
        assert not two[1]["gradient"] and one[0]["gradient"] and two[0]["gradient"]
        for row, left, right in zip(batch.rows, one, two, strict=True):
            values = (0.9 * row.old_logprobs).double().requires_grad_()  # another ratio at each token
            whole, _ = objective.row_loss(row, values, shares(batch, "token"), batch.sequences)
            whole.backward()
            assert left["part"] + right["part"] == pytest.approx(whole.item(), rel=1e-10), kind
            assert left["gradient"] + right["gradient"] == pytest.approx(values.grad.tolist(), rel=1e-10), kind
