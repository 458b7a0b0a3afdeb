"""Decides from a group's rewards whether it can be trained, and if not, why.

Pure functions. Ingest (when it seals a group) and the packer use this one rule, so a group that was sealed as trainable
has advantages when it is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from artd_schema.codec import UNREADABLE
from artd_schema.run.spec import AdvantageSpec

ZERO_VARIANCE = 1e-12
"""Rewards that differ from the first by no more than this are equal."""

Outcome = Literal["trainable", "empty", "single_trajectory", "zero_variance"]


class _Spec(Struct):
    """The part of a stored spec that decides a group's outcome."""

    advantages: AdvantageSpec | UnsetType = UNSET


def trains_equal(spec: bytes) -> bool:
    """Return whether the run of this stored spec may learn from equal rewards. A spec that cannot be read gives False."""
    try:
        how = msgspec.json.decode(spec, type=_Spec).advantages
    except UNREADABLE:
        return False
    return how is not UNSET and how.trains_equal


def group_outcome(rewards: Sequence[float], equal: bool = False) -> Outcome:
    """Return `trainable`, or why the group is discarded when it is sealed. Rewards must be finite. `equal` says that
    equal rewards can be trained on, too."""
    if not rewards:
        return "empty"
    if equal:
        return "trainable"
    if len(rewards) == 1:
        return "single_trajectory"
    first = rewards[0]
    if all(abs(reward - first) <= ZERO_VARIANCE for reward in rewards):
        return "zero_variance"
    return "trainable"
