"""What the engine is served, tensor by tensor under Hugging Face's names, made on the trainer's device and without an engine.

Purpose: the checksums of a checkpoint, and its tensors one after the other for whoever sends them one by one. Owner of: no
weights (they are `WeightSource`'). Invariants: the same ring, the same arithmetic and so the same bits as a direct push, by the plan of
an "engine" whose tensors are the Hugging Face tensors themselves; a checkpoint's sums are made of the weight_lock adapter that
its pushes are fed from.
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

from artd_schema.direct import EngineTable, EngineTensor, Piece, Plan
from artd_schema.manifest import WeightEntry
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
"""Of each process: what is wrong with its plan, and its pieces."""


class ServedWeights:
    """names: of every served tensor, in push order; ranks: the processes of which each gives a part. Raises PlanError (together)
    where a tensor's bytes are no whole words: it has no checksum; CoverError where the parts are no whole."""

    def __init__(self, weight_source: WeightSource, names: Sequence[str], ranks: Collectives = SINGLE_RANK) -> None:
        self.weight_source, self.ranks, self._names = weight_source, ranks, tuple(names)
        self._shapes = weight_source.model
        table = identity_table(self._shapes, weight_source.dtype_name)
        self._schedule = PushSchedule(weight_source, plan_collectively(weight_source, table, ranks))
        spans, self._ends = self._schedule.spans()
        self._spans = weight_source.port.sums(spans)
        self.team: Team | None = None

    def await_readers(self) -> None:
        """Weights that are trained themselves are read as they lie: a push of them ends first."""
        if not self.weight_source.weight_lock.adapter:
            self.weight_source.weight_lock.renew()

    def stage(self) -> Snapshot:
        """From now on pushes are fed the parameters as they are now, together; waits for the push that is fed those before.
        Raises TimeoutError."""
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
        """The next version. The first rank's readers end when those of all do, and nobody is to be asked for a version that
        another has left: so it goes ahead."""
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
        """A slot for each name."""
        plan = self._schedule.plan
        pieces: dict[str, list[Fill]] = {name: [] for name in self._names}
        for piece in plan.pieces:
            pieces[plan.parts[piece.part]].append(Fill(piece, piece.first))
        return self.weight_source.filler(list(pieces.values()), plan)

    @torch.no_grad()
    def _sums(self) -> Tensor:
        """What this process's pieces add to the checksum of each part, int64 on the CPU."""
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
    """What this process gives to the "engine" of `identity_table`, together. Raises what is wrong with any process's part, or with all
    of them together, on each: PlanError, CoverError."""
    if weight_source.spread is None:
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
    """Each served tensor, new on the trainer's device, made when it is its slot on the stream that is current then. Iterate
    it while the snapshot is held."""

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
    """The stream that is current, in a queue's place. None on a CPU."""

    stream: Any

    @classmethod
    def on(cls, device: torch.device) -> CurrentStream:
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)


def identity_table(shapes: Mapping[str, Sequence[int]], dtype: str) -> EngineTable:
    """The table of an engine that holds each Hugging Face tensor by itself. shapes: theirs."""
    tensors = tuple(
        EngineTensor(name, dtype, tuple(shape), (*shape[1:], 1), "", number, 0)
        for number, (name, shape) in enumerate(shapes.items())
    )
    return EngineTable(engine="none", version="", moe_backend="", tensors=tensors)
