"""The loss of a run: the function that its spec names, its part of each row, and its metrics over rows and ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from msgspec import UNSET
from torch import Tensor

from artd_schema.packages import PackageCode
from artd_schema.run.spec import LossSpec
from artd_workers.packages import load
from artd_workers.trainer.batch.row_schedule import sum_over_ranks
from artd_workers.trainer.batch.rows import Batch, PackedRow
from artd_workers.trainer.parallel import context
from artd_workers.trainer.parallel.layout import Parallel

from .corrections import decouple, weigh
from .loss_api import LossInputs, LossOutput, Mean, nothing
from .losses import LOSSES
from .penalties import add_penalties, penalise

FIELDS = ("clip_low", "clip_high")
"""Fields of a run's `loss` that a loss takes as parameters of these names."""


class LossError(ValueError):
    """A loss cannot be used as the run's spec asks, or does not do what a loss has to. Another try gives the same."""


def adopt(code: PackageCode | None) -> None:
    """Add a package's loss to `LOSSES`. Raises PackageError."""
    if code is not None:
        LOSSES[code.kind] = load(code)


@dataclass(frozen=True)
class Beside:
    """What a row's loss may need beside logprobs [n]. `entropy` is in nats, with gradient; `reference` has the base
    model's logprobs, `proximal` those of the weights before the job. Each is None if the run does not ask for it."""

    entropy: Tensor | None = None
    reference: Tensor | None = None
    proximal: Tensor | None = None


NOTHING_BESIDE = Beside()


class Objective:
    """A loss with its parameters, corrections and penalties. `names` lists its metrics."""

    def __init__(self, spec: LossSpec) -> None:
        """Find the loss. Raises LossError if there is no such loss, or if it does not have these parameters."""
        if spec.kind not in LOSSES:
            raise LossError(
                f"loss.kind {spec.kind!r} is not known to the trainer; known: {', '.join(sorted(LOSSES))}: install the package that "
                "brings it where artd runs, start artd again, then `artctl retry JOB`"
            )
        self.kind, self._function, self._spec = spec.kind, LOSSES[spec.kind], spec
        self._parameters = _parameters(spec, self._function)
        self.wants_reference = spec.kl is not UNSET
        self.wants_entropy = spec.entropy_bonus is not UNSET
        self.wants_proximal = spec.proximal == "trainer"
        empty = nothing()
        self.names = tuple(self._tokens(empty, Beside(empty.logprobs, empty.old_logprobs)).metrics)

    def row_loss(
        self, row: PackedRow, logprobs: Tensor, share: Tensor, sequences: int, beside: Beside = NOTHING_BESIDE
    ) -> tuple[Tensor, Mapping[str, Mean]]:
        """Return this row's part of the batch's loss, a scalar, and its metrics. The parts of all rows add up to the
        batch's loss.

        `share` is from `shares`; `sequences` counts those of the batch. Collective: every rank that shares the row
        calls it. Raises LossError.
        """
        inputs = LossInputs(
            logprobs=logprobs, old_logprobs=row.old_logprobs, advantages=row.advantages, mask=row.weights != 0,
            segments=row.segments, sequences=row.sequences, groups=row.groups, trajectories=row.trajectories,
            sequence_count=sequences, across=context.add_with_gradient,
        )  # fmt: skip
        found = self._tokens(inputs, beside)
        if tuple(found.metrics) != self.names:
            raise LossError(
                f"loss {self.kind!r} gives the metrics {list(found.metrics)}, and {list(self.names)} where there is no token: a "
                "loss must always give the same names"
            )
        return (found.tokens * row.weights * share[row.trajectories].to(logprobs.dtype)).sum(), found.metrics

    def _tokens(self, inputs: LossInputs, beside: Beside) -> LossOutput:
        """Compute each token's loss, weighed by the corrections, with the penalties added."""
        reference = beside.reference if self.wants_reference else None
        found = self._call(penalise(decouple(inputs, self._spec, beside.proximal), reference, self._spec))
        weight, corrected = weigh(inputs, self._spec, beside.proximal)
        tokens = found.tokens if weight is None else found.tokens * weight
        tokens, added_to = add_penalties(tokens, inputs, reference, beside.entropy, self._spec)
        return LossOutput(tokens, {**found.metrics, **corrected, **added_to})

    def _call(self, inputs: LossInputs) -> LossOutput:
        try:
            found = self._function(inputs, **self._parameters)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        # a package's code may raise anything, even on one rank alone; another try would not help
        except Exception as error:
            raise LossError(f"loss {self.kind!r}: {type(error).__name__}: {error}") from error
        if not isinstance(found, LossOutput) or found.tokens.shape != inputs.logprobs.shape:
            raise LossError(
                f"loss {self.kind!r} must return a LossOutput with one loss for each of {len(inputs.logprobs)} tokens"
            )
        return found


def _parameters(spec: LossSpec, function: Callable[..., LossOutput]) -> dict[str, float]:
    """Take from the spec what the function has parameters for. Raises LossError, which names them."""
    wanted = {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    given = dict(spec.params or {})
    if extra := sorted(given.keys() - wanted.keys()):
        raise LossError(
            f"loss.params: {spec.kind!r} has no parameter {extra[0]!r}; it has: {', '.join(wanted) or 'none'}"
        )
    for name in FIELDS:
        if wanted.get(name) and name not in given and (value := getattr(spec, name)) is not UNSET:
            given[name] = value
    if missing := [name for name, required in wanted.items() if required and name not in given]:
        raise LossError(f"loss.params: {spec.kind!r} needs {', '.join(missing)}")
    return given


def shares(batch: Batch, normalise: str, divisor: float = 1.0) -> Tensor:
    """Return the weight of one token of each trajectory in the loss, fp64 [trajectories].

    token: 1 / trained tokens of the batch. sequence: 1 / (trajectories with trained tokens x trained tokens of this
    one). constant: 1 / (trajectories with trained tokens x divisor). The numbers are those of the whole batch, so a
    loss does not depend on how the batch was packed.
    """
    counts = batch.counts.double()
    if normalise == "token":
        return torch.full_like(counts, 1.0 / batch.trained)
    lengths = counts.clamp(min=1) if normalise == "sequence" else torch.full_like(counts, divisor)
    return torch.where(counts > 0, 1.0 / (lengths * int((counts > 0).sum())), 0.0)


class Tally:
    """Adds up a loss's metrics over rows, and at the end over ranks. `found` is fp64 [2, metrics]: totals and counts."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self._names = names
        self.found = torch.zeros(2, len(names), dtype=torch.float64, device=device)

    def add(self, metrics: Mapping[str, Mean]) -> None:
        """Add a row's metrics without waiting for the device."""
        for at, mean in enumerate(metrics.values()):
            self.found[0, at] += mean.total
            self.found[1, at] += mean.count

    def metrics(self, parallel: Parallel) -> dict[str, float]:
        """Add up over the ranks, and wait for the device. Collective: every rank calls it."""
        totals, counts = sum_over_ranks(self.found, parallel).tolist()
        return {
            name: total / count for name, total, count in zip(self._names, totals, counts, strict=True) if count > 0
        }
