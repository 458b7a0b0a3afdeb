"""Rewards of a group: can it be trained, and if not, why.

Owner of: no state. Invariants: pure; the ingest service at the seal and the packer use this one rule, so a group that
was sealed as trainable has advantages when it is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

ZERO_VARIANCE = 1e-12
"""Rewards that differ from the first by no more than this are equal."""

Outcome = Literal["trainable", "empty", "single_trajectory", "zero_variance"]


def group_outcome(rewards: Sequence[float]) -> Outcome:
    """`trainable`, or the reason for which the group is discarded at its seal. Rewards must be finite."""
    if not rewards:
        return "empty"
    if len(rewards) == 1:
        return "single_trajectory"
    first = rewards[0]
    if all(abs(reward - first) <= ZERO_VARIANCE for reward in rewards):
        return "zero_variance"
    return "trainable"
