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
from typing import Any

import torch
from torch import Tensor

from artd_schema.direct import EngineTable, EngineTensor
from artd_schema.manifest import WeightEntry

from ...models.codec import Codec
from ..snapshot import Snapshot
from .fill import Filler
from .holdings import Holdings, Lane
from .layout import in_megatron
from .plan import make_plan
from .schedule import Fill


class Served:
    """names: of every served tensor, in push order. Raises PlanError where a tensor's bytes are no whole words: it has no
    checksum."""

    def __init__(self, holdings: Holdings, names: Sequence[str]) -> None:
        self.holdings, self._names = holdings, tuple(names)
        table = identity(holdings.codec, holdings.shapes, holdings.dtype_name)
        self._shapes = {tensor.name: tensor.shape for tensor in table.tensors}
        self._lane = Lane(holdings, make_plan(table, holdings.codec, holdings.shapes, holdings.dtype.itemsize))
        spans, self._ends = self._lane.spans()
        self._spans = holdings.port.sums(spans)

    def before(self) -> None:
        """Weights that are trained themselves are read as they lie: a push of them ends first."""
        if not self.holdings.frozen.adapter:
            self.holdings.frozen.renew()

    def stage(self) -> Snapshot:
        """From now on pushes are fed the parameters as they are now; waits for the push that is fed those before. Raises
        TimeoutError."""
        frozen = self.holdings.frozen
        version = frozen.renew()
        frozen.refill()
        sums = self._sums()
        name = self.holdings.dtype_name
        entries = tuple(WeightEntry(one, name, self._shapes[one], sum64=sums[one]) for one in self._names)
        return Snapshot(entries, Tensors(self, entries), self.holdings.device.type, self.holdings, version)

    @cached_property
    def one_by_one(self) -> Filler:
        """A turn for each name."""
        plan = self._lane.plan
        pieces: dict[str, list[Fill]] = {name: [] for name in self._names}
        for piece in plan.pieces:
            pieces[plan.parts[piece.part]].append(Fill(piece, piece.first))
        return self.holdings.filler(list(pieces.values()), plan)

    @torch.no_grad()
    def _sums(self) -> dict[str, int]:
        lane, ends = self._lane, self._ends
        sums = torch.zeros(len(lane.plan.parts), dtype=torch.int64, device=self.holdings.device)
        self.holdings.settle()
        lane.queue.sum(self._spans, sums, (0, ends[0]))
        for turn in range(len(lane.turns)):
            lane.fill(turn)
            lane.queue.sum(self._spans, sums, (ends[turn], ends[turn + 1]))
        lane.queue.settle()
        return dict(zip(lane.plan.parts, sums.tolist(), strict=True))


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


def identity(codec: Codec, shapes: Mapping[str, Sequence[int]], dtype: str) -> EngineTable:
    """The table of an engine that holds each Hugging Face tensor by itself. shapes: of the Megatron tensors."""
    tensors: list[EngineTensor] = []
    for row in codec.rows:
        shape, sizes = shapes[row.megatron], dict.fromkeys(row.parts, 0)
        for one in in_megatron(row, codec.shape, shape):
            sizes[one.part] += one.count
        for name, size in sizes.items():
            own = (size // shape[-1], shape[-1]) if len(shape) == 2 else (size,)
            tensors.append(EngineTensor(name, dtype, own, (*own[1:], 1), "", len(tensors), 0))
    return EngineTable(engine="none", version="", moe_backend="", tensors=tuple(tensors))
