"""Advantages from rewards: compared within a group (GRPO, arXiv:2402.03300, or leave-one-out) or not at all, scaled, and shaped by length.

Sums are by `math.fsum`, so neither the order of a group's trajectories nor that of groups changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from artd.core.groups import Outcome, group_outcome
from artd_schema.data.manifest import Drop, GroupAdvantage
from artd_schema.run.spec import AdvantageSpec, LengthSpec

from .forest import read_turns
from .inputs import PackError, PackSpec, Source

STD_FLOOR = 1e-6
PLAIN = AdvantageSpec()


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of one group's rewards. `advantages` has one for each reward, all 0.0 unless `outcome` is `trainable`."""

    outcome: Outcome
    mean: float
    std: float
    advantages: tuple[float, ...]


def group_statistics(rewards: Sequence[float], scale: bool, how: AdvantageSpec = PLAIN) -> GroupStatistics:
    """Return mean, population standard deviation and advantages of one group: reward - baseline, divided by std + 1e-6
    if `scale` is true.

    The baseline is the group's mean; the mean of the others, (n mean - reward) / (n - 1) (leave one out,
    arXiv:2402.14740, eq. 6); or 0. Raises ValueError for an empty group or a reward that is not finite.
    """
    if not rewards:
        raise ValueError("a group without trajectories has no statistics")
    for position, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward {position} is {reward}: rewards must be finite")
    mean, std = moments(rewards)
    outcome = group_outcome(rewards, equal=how.baseline in ("none", "given"))
    if outcome != "trainable":
        return GroupStatistics(outcome, mean, std, (0.0,) * len(rewards))
    divisor = std + STD_FLOOR if scale else 1.0
    baseline = mean if how.baseline in ("group", "leave_one_out") else 0.0
    if how.baseline == "leave_one_out":
        divisor *= (len(rewards) - 1) / len(rewards)
    return GroupStatistics(outcome, mean, std, tuple((reward - baseline) / divisor for reward in rewards))


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and population standard deviation."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def normalise(advantages: Sequence[float]) -> list[float]:
    """Return (advantage - mean) / (std + 1e-6) over a whole batch (REINFORCE++, arXiv:2501.03262, section 3)."""
    mean, std = moments(advantages)
    return [(advantage - mean) / (std + STD_FLOOR) for advantage in advantages]


def weigh_by_sign(advantages: Iterable[float], how: AdvantageSpec) -> list[float]:
    """Return the advantages times `positive` above 0, and times `negative` below."""
    return [advantage * (how.positive if advantage > 0 else how.negative) for advantage in advantages]


def length_penalty(tokens: int, length: LengthSpec) -> float:
    """Return the penalty on the reward of a trajectory of so many sampled tokens.

    It is 0 up to limit - buffer, `penalty` from limit on, and linear in between (DAPO's soft overlong punishment,
    arXiv:2503.14476, eq. 13).
    """
    over = tokens - (length.limit - length.buffer)
    return length.penalty * min(max(over / length.buffer, 0.0), 1.0)


Judged = tuple[list[float], list[GroupAdvantage], list[Drop]]
"""(advantage of each source, statistics of each group, whole trajectories that are left out)."""


def judge(spec: PackSpec, sources: Sequence[Source], members: Mapping[int, Sequence[int]]) -> Judged:
    """Compare the rewards of each group. `members` has the indices of `sources` by group. Raises PackError."""
    how = spec.advantages or PLAIN
    rewards, truncated = _read(how, sources)
    advantages = [0.0] * len(sources)
    groups: list[GroupAdvantage] = []
    drops = [_drop_truncated(sources[index]) for index in sorted(truncated)]
    trained: list[int] = []
    for group, indices in members.items():
        counted = [index for index in indices if how.truncated != "drop" or index not in truncated]
        if not counted:
            continue
        try:
            found = group_statistics([rewards[index] for index in counted], spec.scale_rewards, how)
        except ValueError as error:
            raise PackError(f"group {group}: {error}", trajectory=sources[indices[0]].id, position="reward") from error
        groups.append(GroupAdvantage(group=group, size=len(counted), mean=found.mean, std=found.std))
        for index, advantage in zip(counted, found.advantages, strict=True):
            advantages[index] = advantage
            if found.outcome != "trainable" and index not in truncated:
                drops.append(Drop(sources[index].id, f"group {group}: {found.outcome}", "group"))
        trained += counted if found.outcome == "trainable" else []
    for index, advantage in zip(trained, _shape(how, [advantages[index] for index in trained]), strict=True):
        advantages[index] = advantage
    return advantages, groups, drops


def _read(how: AdvantageSpec, sources: Sequence[Source]) -> tuple[list[float], set[int]]:
    """Return the rewards minus the length penalty, and the indices of trajectories that are not trained because an
    answer was cut off."""
    rewards, truncated = [source.reward for source in sources], set()
    if how.length or how.truncated != "train":
        for index, source in enumerate(sources):
            turns = read_turns(source)
            if how.length:
                rewards[index] -= length_penalty(sum(len(turn.token_ids) // 4 for turn in turns), how.length)
            if how.truncated != "train" and any(turn.finish_reason == "length" for turn in turns):
                truncated.add(index)
    return rewards, truncated


def _shape(how: AdvantageSpec, advantages: list[float]) -> list[float]:
    """Normalise over the batch and weigh by sign, if the spec asks for it."""
    if how.batch_scale and advantages:
        advantages = normalise(advantages)
    return advantages if how.positive == how.negative == 1.0 else weigh_by_sign(advantages, how)


def _drop_truncated(source: Source) -> Drop:
    return Drop(source.id, "an answer ended at a limit of length", "truncated")
