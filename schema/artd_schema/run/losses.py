"""Losses by name: those of artd with their defaults. A package may bring others (`packages`).

The functions are in `artd_workers.trainer.step.losses`; this table lets the daemon refuse an unknown loss without importing them.
docs/losses.md gives each default's reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Normalise = Literal["token", "sequence", "constant"]


class Own(NamedTuple):
    """The defaults of one of artd's losses. `params` has the lowest and the highest value of each parameter. `clip_low`
    and `clip_high` are None if the loss has no such bound."""

    params: Mapping[str, tuple[float, float]] = {}
    normalise: Normalise = "token"
    clip_low: float | None = None
    clip_high: float | None = None
    scale_rewards: bool = True
    group_size: int = 8


OWN: dict[str, Own] = {
    "cispo": Own(clip_high=5.0),
    "ppo": Own({"dual_clip": (1.0, 1e9)}, clip_low=0.2, clip_high=0.28),
    "grpo": Own(normalise="sequence", clip_low=0.2, clip_high=0.2),
    "dr_grpo": Own(normalise="constant", clip_low=0.2, clip_high=0.2, scale_rewards=False),
    "gspo": Own(normalise="sequence", clip_low=3e-4, clip_high=4e-4),
    "importance_sampling": Own(),
    "reinforce": Own(),
    "sft": Own(scale_rewards=False, group_size=1),
}
EXAMPLES = "sft"
"""The loss that trains on examples, and only on those."""
OF_A_PACKAGE = Own(clip_high=5.0)
LOSSES: dict[str, tuple[str, ...]] = {kind: tuple(own.params) for kind, own in OWN.items()}
"""`loss.kind` -> the names that its `loss.params` may have."""


def defaults_of(kind: str) -> Own:
    return OWN.get(kind, OF_A_PACKAGE)
