"""What a trainer process serves from, whoever asks: base weights, the weight_lock adapter, a ring of buffers.

Purpose: `WeightSource` is shared by the checksums of a checkpoint and by every pair's `Feeder`; a `PushSchedule` is one plan over it.
Owner of: the buffers, one set a process. Invariants: who uses a buffer has the turn of `WeightLock`; nothing here writes any weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from artd_schema.direct import EngineTable, Piece, Plan
from artd_workers.models.codec import Codec, peft_names
from artd_workers.transfer.checksum import WORD, Span
from artd_workers.transfer.contracts import Port

from .layout import Spread
from .merge_cpu import Filler, PlainFiller
from .plan import make_plan, single_process
from .schedule import Fill, make_schedule
from .weight_lock import WeightLock

BUFFERS = 4
BUFFER_BYTES = 256 << 20


class WeightSource:
    """codec: of what this process gives, which is all of the model unless there is a spread; weights: by its Megatron names (as
    `grouped.slots` gives them); dtype: as served; each: elements of a buffer."""

    def __init__(
        self, port: Port, codec: Codec, weights: Mapping[str, Tensor], weight_lock: WeightLock, dtype: torch.dtype,
        buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES, spread: Spread | None = None,
    ) -> None:  # fmt: skip
        """Raises KeyError for a weight that is not there, ValueError for one that is not contiguous."""
        self.port, self.codec, self.weight_lock, self.dtype, self.spread = port, codec, weight_lock, dtype, spread
        self.weights = {row.megatron: weights[row.megatron].detach() for row in codec.rows}
        if odd := [name for name, tensor in self.weights.items() if not tensor.is_contiguous()]:
            raise ValueError(f"{odd[0]} is not contiguous: it cannot be pulled")
        self._count, self.each = buffers, buffer_bytes // dtype.itemsize
        self.device = next((tensor.device for tensor in self.weights.values()), weight_lock.flat.device)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the trainer's tensors."""
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    @cached_property
    def model(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each whole Hugging Face tensor of the model."""
        return (self.spread or single_process(self.codec, self.shapes)).shapes

    def plan(self, table: EngineTable) -> Plan:
        """What this process gives to an engine. Raises PlanError, CoverError."""
        return make_plan(table, self.codec, self.shapes, self.dtype.itemsize, self.spread)

    @cached_property
    def buffers(self) -> tuple[Tensor, ...]:
        return tuple(torch.empty(self.each, dtype=self.dtype, device=self.device) for _ in range(self._count))

    def filler(self, slots: Sequence[Sequence[Fill]], plan: Plan) -> Filler:
        """Makes these slots of a plan."""
        weights = [self.weights[name] for name in plan.sources]
        if self.device.type == "cuda":
            from .merge_cuda import CudaFiller  # Triton exists only where there is a GPU

            return CudaFiller(
                slots, weights, plan.parts, self.weight_lock.adapter, self.weight_lock.flat, self.weight_lock.scale
            )
        return PlainFiller(slots, weights, plan.parts, self.weight_lock.adapter, self.weight_lock.scale)

    def sources_through_ring(self, plan: Plan, in_place: bool = True) -> dict[int, int]:
        """Sources that pass the ring -> elements in a row: those with an adapter or of another dtype, and all that are trained
        themselves, for only a buffer's end of use is known. in_place: others may be read as they lie; else all pass it."""
        adapter = self.weight_lock.adapter
        adapted = {piece.source for piece in plan.pieces if peft_names(plan.parts[piece.part])[0] in adapter}
        return {
            i: math.prod(tensor.shape[1:]) if tensor.ndim > 1 else tensor.numel()
            for i, tensor in enumerate(self.weights[name] for name in plan.sources)
            if not (in_place and adapter) or i in adapted or tensor.dtype != self.dtype
        }

    def settle(self) -> None:
        """Wait for the device: what the training thread has queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class PushSchedule:
    """A plan's pieces: those that are read where they lie, and those that are made in the buffers, slot by slot. in_place: as for
    `WeightSource.sources_through_ring`."""

    def __init__(self, weight_source: WeightSource, plan: Plan, in_place: bool = True) -> None:
        self._weight_source, self.plan = weight_source, plan
        found = make_schedule(plan, weight_source.sources_through_ring(plan, in_place), weight_source.each)
        self.in_place, self.slots = found.in_place, found.slots
        self._filler = weight_source.filler(self.slots, plan)
        self.queue = weight_source.port.queue()

    def buffer(self, slot: int) -> Tensor:
        """Where a slot is made."""
        return self._weight_source.buffers[slot % len(self._weight_source.buffers)]

    def fill(self, slot: int) -> None:
        """Queue the making of a slot."""
        self._filler.fill(slot, self.buffer(slot), self.queue)

    def spans(self) -> tuple[list[Span], list[int]]:
        """Spans of what lies, then of each slot in its buffer; ends: of those that lie, and of each slot."""
        size = self._weight_source.dtype.itemsize
        weights = [self._weight_source.weights[name] for name in self.plan.sources]
        spans = [_span(p, weights[p.source].data_ptr() + p.begin * size, size) for p in self.in_place]
        ends = [len(spans)]
        for slot, fills in enumerate(self.slots):
            spans += _spans(fills, self.buffer(slot).data_ptr(), size)
            ends.append(len(spans))
        return spans, ends


def _spans(fills: Iterable[Fill], base: int, size: int) -> list[Span]:
    return [_span(one.piece, base + one.at * size, size) for one in fills]


def _span(piece: Piece, address: int, size: int) -> Span:
    words = [n * size // WORD for n in (piece.first, piece.count, piece.width, piece.pitch)]
    return Span(address, words[0], words[1], piece.part, width=words[2], pitch=words[3])
