"""The interface of a loss: its inputs and its outputs, which are all that the author of a loss has to know.

A loss is one function `(inputs: LossInputs, *, parameter: float = default, ...) -> LossOutput` in `losses.LOSSES`, or
of a package with an entry point in the group `artd.losses`. The keyword parameters `clip_low` and `clip_high`, if they
have no default, are these fields of the run's `loss` spec; the others come from `loss.params`. A loss gets the trained
tokens of one row, or of this rank's part of a row. All tokens of a sequence are in one row. A loss must accept inputs
without any token. The same inputs must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The trained tokens [n] of a row, in the order of the row.

    `logprobs` are the trainer's, fp32, with gradient. `old_logprobs` are those of the engine that sampled the tokens,
    at the sampling temperature. `mask` is False where a token has no weight, because this rank computes the row only to
    keep step with the others. `segments` has the id of each token's segment in the row. `sequences`, `groups` and
    `trajectories` are numbers in the batch, from 0: a trajectory has one sequence or more, a group has several
    trajectories and may span several rows, a sequence is in one row. `sequence_count` is that of the batch. `across`
    adds a tensor over the ranks that share the row; if none do, it returns the tensor unchanged.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    segments: Tensor
    sequences: Tensor
    groups: Tensor
    trajectories: Tensor
    sequence_count: int
    across: Callable[[Tensor], Tensor] = _alone

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return for each token the sum of `values` [n] over its sequence, with gradient.

        Collective where ranks share a row: every call of the loss must call it, whatever the tokens are, and must use
        the result (or use it detached).
        """
        totals = values.new_zeros(self.sequence_count).index_add(0, self.sequences, values)
        return self.across(totals)[self.sequences]


@dataclass(frozen=True)
class Mean:
    """A metric of one row as a sum and a count, so that rows and ranks can be added up.

    The step's metric is the total of the sums divided by the total of the counts. It is absent if the total count is 0.
    """

    total: Tensor
    count: Tensor | float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """Take the mean of one value for each token, [n]."""
        return cls(values.detach().double().sum(), float(len(values)))


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns. `tokens` is the loss of each token [n], which artd weighs by the run's `normalise`, adds up
    and minimises.

    `metrics` has the same names for any inputs. If artd itself measures something under such a name, artd's value is
    used.
    """

    tokens: Tensor
    metrics: Mapping[str, Mean] = field(default_factory=dict)


class Loss(Protocol):
    """The function that is a loss."""

    def __call__(self, inputs: LossInputs, **parameters: float) -> LossOutput: ...


def nothing() -> LossInputs:
    """Make inputs without a token."""
    floats, numbers = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    return LossInputs(
        logprobs=floats.clone().requires_grad_(), old_logprobs=floats, advantages=floats, mask=floats.bool(),
        segments=numbers, sequences=numbers, groups=numbers, trajectories=numbers, sequence_count=0,
    )  # fmt: skip
