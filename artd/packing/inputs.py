"""The packer's input, and the errors that say why it gives no batch. The same specification and sources give the same
bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from artd_schema.data.manifest import Drop
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import AdvantageSpec, Learning


class PackError(Exception):
    """No batch can be made. `trajectory` is the row id of the guilty one, 0 for none; `position` is a path in its body,
    such as turns[2]."""

    def __init__(self, message: str, *, trajectory: int = 0, position: str = "", drops: tuple[Drop, ...] = ()) -> None:
        super().__init__(message)
        self.trajectory = trajectory
        self.position = position
        self.drops = drops


class StoreDamaged(Exception):
    """The stored bytes of a trajectory are not those that were acknowledged, however often they are read."""

    def __init__(self, message: str, trajectory: int) -> None:
        super().__init__(message)
        self.trajectory = trajectory


class PackSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What determines a batch beside its trajectories. `row_length` is in tokens. Every token must have routes of the
    shape `routes`, and the batch then has a replay bundle; None means a dense model or expert_replay=false. `learning`
    says what the batch will be trained with."""

    run: str
    step: int
    seed: int
    row_length: int
    scale_rewards: bool
    base_digest: str
    routes: RouteShape | None = None
    advantages: AdvantageSpec | UnsetType = UNSET
    learning: Learning | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Source:
    """One stored trajectory. `body` is msgpack list[Turn]; `digest` is the body's sha256 in hex, already verified;
    `metrics` are the client's own."""

    id: int
    group: int
    reward: float
    digest: str
    body: bytes
    metrics: Mapping[str, float] = field(default_factory=dict)
