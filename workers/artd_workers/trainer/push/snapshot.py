"""A committed checkpoint as pushes read it: the list of its served tensors, and the tensors.

A snapshot owns its tensors when they are copies. What it gives never changes while it is held, and a snapshot whose
weights have changed cannot be held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from artd_schema.data.manifest import WeightEntry
from artd_workers.deadline import Deadline

if TYPE_CHECKING:
    from artd_workers.trainer.push.direct.team import Team
    from artd_workers.trainer.push.direct.weight_source import WeightSource


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint serves.

    `entries` has the rows of weights.json, in its order. `tensors` has each row with its tensor, which is made on
    demand unless it is a copy. `device` is that of the tensors. `weight_source` and `version` name the weights on a GPU
    from which the tensors are made. `team` has the other processes with parts of the weights; if there is one,
    `tensors` is not available.
    """

    entries: tuple[WeightEntry, ...]
    tensors: Iterable[tuple[WeightEntry, Tensor]]
    device: str = "cpu"
    weight_source: WeightSource | None = None
    version: int = 0
    team: Team | None = None

    def hold(self, deadline: Deadline, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """Keep the snapshot unchanged during the block.

        `abort` is called, from another thread, when the block lasts beyond the deadline and the weights must change.
        Raises Stale when the weights have changed already, and TimeoutError when other pushes hold them until the
        deadline.
        """
        if self.weight_source is None:
            return nullcontext()
        return self.weight_source.weight_lock.read(self.version, deadline, abort)
