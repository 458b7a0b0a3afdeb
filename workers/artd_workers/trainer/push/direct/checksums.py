"""The checksums of a checkpoint, and its tensors one by one, computed on the trainer's device without an engine.

Both go by Hugging Face names. They use the plan of an "engine" whose tensors are the Hugging Face tensors themselves,
and the ring and arithmetic of a direct push, so they have the bits that a push sends. A checkpoint's sums come from
the same copy of the adapter that feeds its pushes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from artd_schema.data.manifest import WeightEntry
from artd_schema.wire.direct import EngineTable, EngineTensor, Piece, Plan
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.transfer.coverage import CoverError

from .collectives import SINGLE_RANK, Collectives
from .merge_cpu import Filler
from .plan import PlanError, check_coverage
from .schedule import Fill
from .weight_source import PushSchedule, WeightSource

if TYPE_CHECKING:
    from .team import Team

_Told = tuple[str, tuple[Piece, ...]]
"""What each process says about its plan: an error ("" for none), and the plan's pieces."""


class ServedWeights:
    """The weights that a run serves. `names` lists every served tensor, in push order. `ranks` are the processes that
    each hold a part.

    Raises PlanError if the bytes of a tensor are not whole 64-bit words, which a checksum needs, and CoverError if the
    parts do not make up the model; each is raised on all ranks. Collective: every rank makes one.
    """

    def __init__(self, weight_source: WeightSource, names: Sequence[str], ranks: Collectives = SINGLE_RANK) -> None:
        self.weight_source, self.ranks, self._names = weight_source, ranks, tuple(names)
        self._shapes = weight_source.model
        table = identity_table(self._shapes, weight_source.dtype_name)
        self._schedule = PushSchedule(weight_source, plan_collectively(weight_source, table, ranks))
        spans, self._ends = self._schedule.spans()
        self._spans = weight_source.port.sums(spans)
        self.team: Team | None = None

    def await_readers(self) -> None:
        """Wait for a push that reads the weights themselves, which happens only when training changes them directly,
        without an adapter.
        """
        if not self.weight_source.weight_lock.adapter:
            self.weight_source.weight_lock.renew()

    def stage(self) -> Snapshot:
        """Freeze the parameters as they are now, and serve pushes from that state. First waits for the push that
        reads the previous state.

        Raises TimeoutError. Collective: every rank calls it.
        """
        version = self._next_version()
        with self.ranks.share_errors():
            self.weight_source.weight_lock.copy_adapter()
            sums = self._sums()
        total = self.ranks.all_reduce(sums).tolist()
        by_name = dict(zip(self._schedule.plan.parts, total, strict=True))
        name = self.weight_source.dtype_name
        entries = tuple(WeightEntry(one, name, self._shapes[one], sum64=by_name[one]) for one in self._names)
        tensors = Tensors(self, entries)
        return Snapshot(entries, tensors, self.weight_source.device.type, self.weight_source, version, self.team)

    def _next_version(self) -> int:
        """Begin the next version on all ranks, rank 0 first, and return its number.

        Rank 0 begins only when no push reads the old version on any rank. If another rank began earlier, rank 0 could
        still ask it for the old version.
        """
        weight_lock, version = self.weight_source.weight_lock, 0
        with self.ranks.share_errors():
            if self.ranks.first:
                version = weight_lock.renew()
        version = self.ranks.broadcast(version)
        with self.ranks.share_errors():
            if not self.ranks.first:
                weight_lock.renew(version)
        return version

    @cached_property
    def one_by_one(self) -> Filler:
        """A filler with one slot per tensor."""
        plan = self._schedule.plan
        pieces: dict[str, list[Fill]] = {name: [] for name in self._names}
        for piece in plan.pieces:
            pieces[plan.parts[piece.part]].append(Fill(piece, piece.first))
        return self.weight_source.filler(list(pieces.values()), plan)

    @torch.no_grad()
    def _sums(self) -> Tensor:
        """Return what this process's pieces add to each part's checksum, int64 [parts] on the CPU."""
        schedule, ends = self._schedule, self._ends
        sums = torch.zeros(len(schedule.plan.parts), dtype=torch.int64, device=self.weight_source.device)
        if not schedule.plan.pieces:
            return sums.cpu()
        self.weight_source.settle()
        schedule.queue.sum(self._spans, sums, (0, ends[0]))
        for slot in range(len(schedule.slots)):
            schedule.fill(slot)
            schedule.queue.sum(self._spans, sums, (ends[slot], ends[slot + 1]))
        schedule.queue.settle()
        return sums.cpu()


def plan_collectively(weight_source: WeightSource, table: EngineTable, ranks: Collectives) -> Plan:
    """Return this process's plan for the "engine" of `identity_table`.

    Raises PlanError or CoverError on every rank when any rank's part is wrong, or all parts together. Collective:
    every rank calls it.
    """
    if weight_source.sharding is None:
        return weight_source.plan(table)
    plan, why = Plan(parts=(), sources=(), pieces=()), ""
    try:
        plan = weight_source.plan(table)
    except (PlanError, CoverError) as error:
        why = str(error)
    told = [
        msgspec.msgpack.decode(one, type=_Told) for one in ranks.all_gather(msgspec.msgpack.encode((why, plan.pieces)))
    ]
    if wrong := next((why for why, _ in told if why), ""):
        raise PlanError(wrong)
    sizes = [prod(shape) for shape in weight_source.model.values()]
    check_coverage(table, plan.parts, sizes, [piece for _, pieces in told for piece in pieces])
    return plan


class Tensors:
    """The served tensors, each made anew on the trainer's device when the iteration reaches it, on the stream that is
    current then. Iterate only while the snapshot is held.
    """

    def __init__(self, served: ServedWeights, entries: Sequence[WeightEntry]) -> None:
        self._served, self._entries = served, entries

    def __iter__(self) -> Iterator[tuple[WeightEntry, Tensor]]:
        filler, weight_source = self._served.one_by_one, self._served.weight_source
        for number, entry in enumerate(self._entries):
            tensor = torch.empty(entry.shape, dtype=weight_source.dtype, device=weight_source.device)
            filler.fill(number, tensor.view(-1), CurrentStream.on(weight_source.device))
            yield entry, tensor


@dataclass(frozen=True)
class CurrentStream:
    """The current stream of a device, in place of a queue. None on a CPU."""

    stream: Any

    @classmethod
    def on(cls, device: torch.device) -> CurrentStream:
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)


def identity_table(shapes: Mapping[str, Sequence[int]], dtype: str) -> EngineTable:
    """Return the table of an engine that holds each Hugging Face tensor by itself. `shapes`: their shapes by name."""
    tensors = tuple(
        EngineTensor(name, dtype, tuple(shape), (*shape[1:], 1), "", number, 0)
        for number, (name, shape) in enumerate(shapes.items())
    )
    return EngineTable(engine="none", version="", moe_backend="", tensors=tensors)
