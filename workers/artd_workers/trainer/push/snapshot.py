"""What a committed checkpoint is sent from: a list of its served tensors, and where they lie.

Owner of: the tensors, where they are copies. Invariants: what a snapshot gives never changes while it is held; a snapshot whose
weights are gone cannot be held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from artd_schema.manifest import WeightEntry
from artd_workers.deadline import Deadline

if TYPE_CHECKING:
    from artd_workers.trainer.push.direct.team import Team
    from artd_workers.trainer.push.direct.weight_source import WeightSource


@dataclass(frozen=True)
class Snapshot:
    """entries: of weights.json, in its order; tensors: the same with each tensor, which is made when it is asked for where
    they are not kept. device: where those lie; weight_source, version: the weights on a GPU that they are made of; team: other
    processes that have parts of them, so that `tensors` cannot be had."""

    entries: tuple[WeightEntry, ...]
    tensors: Iterable[tuple[WeightEntry, Tensor]]
    device: str = "cpu"
    weight_source: WeightSource | None = None
    version: int = 0
    team: Team | None = None

    def hold(self, deadline: Deadline, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, nothing of it changes. abort: called, from another thread, when it is held beyond the deadline and the
        weights have to change. Raises Stale when they have changed, TimeoutError when others hold them too long."""
        if self.weight_source is None:
            return nullcontext()
        return self.weight_source.weight_lock.read(self.version, deadline, abort)
