"""What a loss is given and what it returns: all that the author of a loss has to know.

A loss is one function `(inputs: LossInputs, *, parameter: float = default, ...) -> LossOutput` of `losses.LOSSES`, or of a package with
an entry point in the group `artd.losses`. The keyword parameters `clip_low` and `clip_high`, if they have no default, are these fields of the
run's `loss` spec; the others come from `loss.params`.
Invariants: a loss sees the trained tokens of one row, or of this rank's part of a row; all tokens of a sequence are in one row. No
token at all is a case that a loss has to bear. The same inputs give the same bits.
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

    logprobs: of the trainer, fp32, with gradient; old_logprobs: of the engine that sampled the tokens, at the sampling temperature;
    advantages; mask: False where a token has no weight, because this rank does the row only to keep step with the others.
    segments: id of the token's segment in the row; sequences, groups, trajectories: numbers in the batch, from 0. A trajectory has one
    sequence or more, a group several trajectories; a group may lie in several rows, a sequence does not.
    sequence_count: of the batch. across: adds a tensor over the ranks that share the row (None of them: returns it).
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
        """For each token the sum of `values` [n] over its sequence, with gradient.

        Collective where ranks share a row: every call of the loss makes it, whatever the tokens are, and the result (or nothing
        of it, `detach`) reaches the loss.
        """
        totals = values.new_zeros(self.sequence_count).index_add(0, self.sequences, values)
        return self.across(totals)[self.sequences]


@dataclass(frozen=True)
class Mean:
    """A metric: what is measured of one row as a sum and how much it is a sum of, so that rows and ranks add up.

    The step's metric is the total of the sums by the total of the counts; it is absent where nothing was counted."""

    total: Tensor
    count: Tensor | float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """Take the mean of one value a token, [n]."""
        return cls(values.detach().double().sum(), float(len(values)))


@dataclass(frozen=True)
class LossOutput:
    """tokens: the loss of each token [n], which artd weighs by the run's `normalise` and adds up; it is minimised.

    metrics: by name, the same names for any inputs. What artd itself measures under a name counts before it.
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
