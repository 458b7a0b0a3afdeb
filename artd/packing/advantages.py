"""Group-relative advantages (GRPO, arXiv:2402.03300): reward - mean, optionally / (population std + 1e-6).

Owner of: no state. Invariants: sums by `math.fsum`, so the order of a group's trajectories does not change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from artd.core.groups import Outcome, group_outcome

STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of one group's rewards. advantages: one a reward, all 0.0 unless outcome is `trainable`."""

    outcome: Outcome
    mean: float
    std: float
    advantages: tuple[float, ...]


def group_statistics(rewards: Sequence[float], scale: bool) -> GroupStatistics:
    """Mean, population standard deviation and advantages of one group; `scale` divides by std + 1e-6.

    Raises ValueError on an empty group or a reward that is not finite.
    """
    if not rewards:
        raise ValueError("a group without trajectories has no statistics")
    for position, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward {position} is {reward}: rewards must be finite")
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    outcome = group_outcome(rewards)
    if outcome != "trainable":
        return GroupStatistics(outcome, mean, std, (0.0,) * len(rewards))
    divisor = std + STD_FLOOR if scale else 1.0
    return GroupStatistics(outcome, mean, std, tuple((reward - mean) / divisor for reward in rewards))
