"""What the engine is served, tensor by tensor under Hugging Face's names, made on the trainer's device and without an engine.

Purpose: the checksums of a checkpoint, and its tensors one after the other for whoever sends them one by one. Owner of: no
weights (they are `Holdings`'). Invariants: the same ring, the same arithmetic and so the same bits as a direct push, by the plan of
an "engine" whose tensors are the Hugging Face tensors themselves; a checkpoint's sums are made of the frozen adapter that
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

from .collectives import ONE, Together
from .holdings import Holdings, Lane
from .merge_cpu import Filler
from .plan import PlanError, check_whole
from .schedule import Fill

if TYPE_CHECKING:
    from .team import Team

_Told = tuple[str, tuple[Piece, ...]]
"""Of each process: what is wrong with its plan, and its pieces."""


class Served:
    """names: of every served tensor, in push order; ranks: the processes of which each gives a part. Raises PlanError (together)
    where a tensor's bytes are no whole words: it has no checksum; CoverError where the parts are no whole."""

    def __init__(self, holdings: Holdings, names: Sequence[str], ranks: Together = ONE) -> None:
        self.holdings, self.ranks, self._names = holdings, ranks, tuple(names)
        self._shapes = holdings.model
        table = identity(self._shapes, holdings.dtype_name)
        self._lane = Lane(holdings, agreed_plan(holdings, table, ranks))
        spans, self._ends = self._lane.spans()
        self._spans = holdings.port.sums(spans)
        self.team: Team | None = None

    def before(self) -> None:
        """Weights that are trained themselves are read as they lie: a push of them ends first."""
        if not self.holdings.frozen.adapter:
            self.holdings.frozen.renew()

    def stage(self) -> Snapshot:
        """From now on pushes are fed the parameters as they are now, together; waits for the push that is fed those before.
        Raises TimeoutError."""
        version = self._renewed()
        with self.ranks.agreed():
            self.holdings.frozen.refill()
            sums = self._sums()
        total = self.ranks.added(sums).tolist()
        by_name = dict(zip(self._lane.plan.parts, total, strict=True))
        name = self.holdings.dtype_name
        entries = tuple(WeightEntry(one, name, self._shapes[one], sum64=by_name[one]) for one in self._names)
        tensors = Tensors(self, entries)
        return Snapshot(entries, tensors, self.holdings.device.type, self.holdings, version, self.team)

    def _renewed(self) -> int:
        """The next version. The first rank's readers end when those of all do, and nobody is to be asked for a version that
        another has left: so it goes ahead."""
        frozen, version = self.holdings.frozen, 0
        with self.ranks.agreed():
            if self.ranks.first:
                version = frozen.renew()
        version = self.ranks.told(version)
        with self.ranks.agreed():
            if not self.ranks.first:
                frozen.renew(version)
        return version

    @cached_property
    def one_by_one(self) -> Filler:
        """A turn for each name."""
        plan = self._lane.plan
        pieces: dict[str, list[Fill]] = {name: [] for name in self._names}
        for piece in plan.pieces:
            pieces[plan.parts[piece.part]].append(Fill(piece, piece.first))
        return self.holdings.filler(list(pieces.values()), plan)

    @torch.no_grad()
    def _sums(self) -> Tensor:
        """What this process's pieces add to the checksum of each part, int64 on the CPU."""
        lane, ends = self._lane, self._ends
        sums = torch.zeros(len(lane.plan.parts), dtype=torch.int64, device=self.holdings.device)
        if not lane.plan.pieces:
            return sums.cpu()
        self.holdings.settle()
        lane.queue.sum(self._spans, sums, (0, ends[0]))
        for turn in range(len(lane.turns)):
            lane.fill(turn)
            lane.queue.sum(self._spans, sums, (ends[turn], ends[turn + 1]))
        lane.queue.settle()
        return sums.cpu()


def agreed_plan(holdings: Holdings, table: EngineTable, ranks: Together) -> Plan:
    """What this process gives to the "engine" of `identity`, together. Raises what is wrong with any process's part, or with all
    of them together, on each: PlanError, CoverError."""
    if holdings.spread is None:
        return holdings.plan(table)
    plan, why = Plan(parts=(), sources=(), pieces=()), ""
    try:
        plan = holdings.plan(table)
    except (PlanError, CoverError) as error:
        why = str(error)
    told = [msgspec.msgpack.decode(one, type=_Told) for one in ranks.shared(msgspec.msgpack.encode((why, plan.pieces)))]
    if wrong := next((why for why, _ in told if why), ""):
        raise PlanError(wrong)
    sizes = [prod(shape) for shape in holdings.model.values()]
    check_whole(table, plan.parts, sizes, [piece for _, pieces in told for piece in pieces])
    return plan


class Tensors:
    """Each served tensor, new on the trainer's device, made when it is its turn on the stream that is current then. Iterate
    it while the snapshot is held."""

    def __init__(self, served: Served, entries: Sequence[WeightEntry]) -> None:
        self._served, self._entries = served, entries

    def __iter__(self) -> Iterator[tuple[WeightEntry, Tensor]]:
        filler, holdings = self._served.one_by_one, self._served.holdings
        for number, entry in enumerate(self._entries):
            tensor = torch.empty(entry.shape, dtype=holdings.dtype, device=holdings.device)
            filler.fill(number, tensor.view(-1), Current.on(holdings.device))
            yield entry, tensor


@dataclass(frozen=True)
class Current:
    """The stream that is current, in a queue's place. None on a CPU."""

    stream: Any

    @classmethod
    def on(cls, device: torch.device) -> Current:
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)


def identity(shapes: Mapping[str, Sequence[int]], dtype: str) -> EngineTable:
    """The table of an engine that holds each Hugging Face tensor by itself. shapes: theirs."""
    tensors = tuple(
        EngineTensor(name, dtype, tuple(shape), (*shape[1:], 1), "", number, 0)
        for number, (name, shape) in enumerate(shapes.items())
    )
    return EngineTable(engine="none", version="", moe_backend="", tensors=tensors)
