"""Random batches for losses in fp64: the same sequences in any rows, and cut over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from artd_schema.run.spec import LossSpec
from artd_workers.trainer.batch.row_schedule import TRAINED
from artd_workers.trainer.batch.rows import Batch, PackedRow
from artd_workers.trainer.parallel import context
from artd_workers.trainer.step.objective import Beside, Objective, shares

from .loss_oracle import Seq

Rows = Sequence[Sequence[int]]
"""For each row the indices of its sequences."""


def sequences(random: Generator, spread: float = 0.6, trajectories: int = 5) -> list[Seq]:
    """Trajectories of one to three sequences. spread: of log ratios, so that every bound of a loss is met."""
    found = []
    for trajectory in range(trajectories):
        sign = 1 if trajectory % 2 else -1
        for _ in range(int(random.integers(1, 4))):
            n = int(random.integers(1, 9))
            old = -4 * random.random(n) - 0.1
            new = np.minimum(old + spread * random.standard_normal(n), -1e-3)
            base, entropy = new + 0.4 * random.standard_normal(n), random.random(n)
            advantages, weights = sign * (0.2 + random.random(n)), 0.5 + random.random(n)
            found.append(Seq(trajectory, new, old, advantages, weights, base, entropy))
    return found


def packings(random: Generator, count: int) -> list[Rows]:
    """One row for all, one each, and shuffled into a few."""
    order = random.permutation(count).tolist()
    cuts = sorted({0, count, *random.integers(1, count, 2).tolist()})
    return [[range(count)], [[i] for i in range(count)], [order[a:b] for a, b in pairwise(cuts)]]


def batch_of(found: Sequence[Seq], rows: Rows) -> tuple[Batch, list[Tensor]]:
    """The batch in fp64, and each row's logprobs."""
    packed, values, number = [], [], 0
    for row in rows:
        own = [found[i] for i in row]
        packed.append(_row(own, number))
        number += len(own)
        values.append(_joined([one.new for one in own]).requires_grad_())
    counts = torch.zeros(1 + max(one.trajectory for one in found), dtype=torch.int64)
    for one in found:
        counts[one.trajectory] += len(one.new)
    return Batch(cast(Any, None), "", tuple(packed), counts), values


def _joined(columns: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns))


def _row(own: Sequence[Seq], number: int) -> PackedRow:
    lengths = torch.tensor([len(one.new) for one in own])
    segments = torch.arange(len(own)).repeat_interleave(lengths)
    trajectories = torch.tensor([one.trajectory for one in own]).repeat_interleave(lengths)
    old, at = _joined([one.old for one in own]), torch.arange(int(lengths.sum()))
    return PackedRow(
        at, at, at, at, at, old, _joined([one.advantages for one in own]), _joined([one.weights for one in own]),
        torch.ones_like(old), torch.zeros_like(at), trajectories, segments, segments + number, trajectories // 2,
    )  # fmt: skip


def besides(found: Sequence[Seq], rows: Rows) -> list[Beside]:
    """What each row's loss may need beside its logprobs."""
    return [
        Beside(_joined([found[i].entropy for i in row]).requires_grad_(), _joined([found[i].base for i in row]))
        for row in rows
    ]


def computed(
    spec: LossSpec, batch: Batch, values: Sequence[Tensor], beside: Sequence[Beside]
) -> tuple[float, list[Tensor]]:
    """(loss, gradient of each row's logprobs) as a step adds them up."""
    objective, share = Objective(spec), shares(batch, spec.normalise, spec.divisor or 1.0)
    rows = zip(batch.rows, values, beside, strict=True)
    found = torch.stack([objective.row_loss(row, v, share, batch.sequences, b)[0] for row, v, b in rows]).sum()
    return found.item(), list(torch.autograd.grad(found, values))


def by_sequence(rows: Rows, found: Sequence[Seq], gradients: Sequence[Tensor]) -> list[Any]:
    """Each sequence's gradient, in the order of `found`."""
    out: dict[int, Any] = {}
    for row, gradient in zip(rows, gradients, strict=True):
        at = 0
        for index in row:
            out[index] = gradient[at : at + len(found[index].new)].numpy()
            at += len(found[index].new)
    return [out[index] for index in range(len(found))]


class TwoRanks:
    """Two threads that share each row, as two ranks do; `add` adds their tensors, with gradient."""

    def __init__(self) -> None:
        self._barrier, self._held = threading.Barrier(2, timeout=20), [torch.zeros(()), torch.zeros(())]
        self.rank = threading.local()

    def add(self, values: Tensor) -> Tensor:
        self._held[self.rank.number] = values
        self._barrier.wait()
        total = self._held[0] + self._held[1]
        self._barrier.wait()
        return total

    def both(self, work: Callable[[int], Tensor]) -> Tensor:
        """Sum of what each rank's work gives. Raises what a rank raises."""
        found: list[Any] = [None, None]

        def run(number: int) -> None:
            self.rank.number = number
            try:
                found[number] = work(number)
            except BaseException as error:
                found[number] = error
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return cast(Tensor, found[0] + found[1])


def over_two_ranks(
    spec: LossSpec,
    batch: Batch,
    values: Sequence[Tensor],
    beside: Sequence[Beside],
    cuts: Sequence[int],
    monkeypatch: Any,
) -> tuple[float, list[Tensor]]:
    """As `computed`, with each row cut in two at these tokens."""
    ranks, objective, share = TwoRanks(), Objective(spec), shares(batch, spec.normalise, spec.divisor or 1.0)
    monkeypatch.setattr(context, "add_with_gradient", ranks.add)
    total = torch.zeros((), dtype=torch.float64)
    for row, value, b, cut in zip(batch.rows, values, beside, cuts, strict=True):
        parts = [slice(0, cut), slice(cut, len(value))]
        mine = [replace(row, **{name: getattr(row, name)[part] for name in TRAINED}) for part in parts]

        own = [Beside(*(None if x is None else x[part] for x in (b.entropy, b.reference))) for part in parts]

        def work(number: int, mine: Any = mine, value: Tensor = value, parts: Any = parts, own: Any = own) -> Tensor:
            return objective.row_loss(mine[number], value[parts[number]], share, batch.sequences, own[number])[0]

        total = total + ranks.both(work)
    return total.item(), list(torch.autograd.grad(total, values))
