"""What one trainer process serves its weights from: base weights, a copy of the adapter, and a ring of buffers.

A checkpoint's checksums and every pair's `Feeder` share one `WeightSource`; a `PushSchedule` is one plan over it. It
owns the buffers, one set per process. Only the reader of the `WeightLock` uses a buffer. Nothing here writes a
weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from artd_schema.wire.direct import EngineTable, Piece, Plan
from artd_workers.models.codec import Codec, peft_names
from artd_workers.transfer.checksum import WORD, Span
from artd_workers.transfer.contracts import Port

from .layout import Sharding
from .merge_cpu import Filler, PlainFiller
from .plan import make_plan, single_process
from .schedule import Fill, make_schedule
from .weight_lock import WeightLock

BUFFERS = 4
BUFFER_BYTES = 256 << 20


class WeightSource:
    """The weights that this process gives.

    `codec` has the rows that it gives, which are all rows of the model unless there is a `sharding`. `weights` maps
    Megatron names to weights, as `grouped.slots` returns them. `dtype` is that in which they are served. `buffers` is
    the number of buffers, `buffer_bytes` the size of each.
    """

    def __init__(
        self, port: Port, codec: Codec, weights: Mapping[str, Tensor], weight_lock: WeightLock, dtype: torch.dtype,
        buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES, sharding: Sharding | None = None,
    ) -> None:  # fmt: skip
        """Check the weights. Raises KeyError for a missing weight and ValueError for one that is not contiguous."""
        self.port, self.codec, self.weight_lock, self.dtype, self.sharding = port, codec, weight_lock, dtype, sharding
        self.weights = {row.megatron: weights[row.megatron].detach() for row in codec.rows}
        if odd := [name for name, tensor in self.weights.items() if not tensor.is_contiguous()]:
            raise ValueError(f"{odd[0]} is not contiguous: it cannot be pulled")
        self._count, self.each = buffers, buffer_bytes // dtype.itemsize
        self.device = next((tensor.device for tensor in self.weights.values()), weight_lock.flat.device)

    @property
    def dtype_name(self) -> str:
        """The served dtype's name, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this process's tensors, by Megatron name."""
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    @cached_property
    def model(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the model's whole Hugging Face tensors, by name."""
        return (self.sharding or single_process(self.codec, self.shapes)).shapes

    def plan(self, table: EngineTable) -> Plan:
        """Return what this process gives to an engine. Raises PlanError, CoverError."""
        return make_plan(table, self.codec, self.shapes, self.dtype.itemsize, self.sharding)

    @cached_property
    def buffers(self) -> tuple[Tensor, ...]:
        """The ring's buffers."""
        return tuple(torch.empty(self.each, dtype=self.dtype, device=self.device) for _ in range(self._count))

    def filler(self, slots: Sequence[Sequence[Fill]], plan: Plan) -> Filler:
        """Return a filler for these slots of a plan."""
        weights = [self.weights[name] for name in plan.sources]
        if self.device.type == "cuda":
            from .merge_cuda import CudaFiller  # Triton is installed only with GPUs

            return CudaFiller(
                slots, weights, plan.parts, self.weight_lock.adapter, self.weight_lock.flat, self.weight_lock.scale
            )
        return PlainFiller(slots, weights, plan.parts, self.weight_lock.adapter, self.weight_lock.scale)

    def sources_through_ring(self, plan: Plan, in_place: bool = True) -> dict[int, int]:
        """Map each source that must be copied through the ring to the elements of its row.

        A source needs the ring if it has an adapter, has another dtype than the engine, or is itself trained: the
        trainer learns when the engine is done with a buffer, never when it is done with a tensor that it reads in
        place. `in_place=False` sends every source through the ring.
        """
        adapter = self.weight_lock.adapter
        adapted = {piece.source for piece in plan.pieces if peft_names(plan.parts[piece.part])[0] in adapter}
        return {
            i: math.prod(tensor.shape[1:]) if tensor.ndim > 1 else tensor.numel()
            for i, tensor in enumerate(self.weights[name] for name in plan.sources)
            if not (in_place and adapter) or i in adapted or tensor.dtype != self.dtype
        }

    def settle(self) -> None:
        """Wait until the device has done all work that the training thread has queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class PushSchedule:
    """A plan, ready to run on this process's weights.

    `in_place` holds the pieces that are read from the weights themselves, `slots` those that are made in the ring's
    buffers. The argument `in_place` is as in `WeightSource.sources_through_ring`.
    """

    def __init__(self, weight_source: WeightSource, plan: Plan, in_place: bool = True) -> None:
        self._weight_source, self.plan = weight_source, plan
        found = make_schedule(plan, weight_source.sources_through_ring(plan, in_place), weight_source.each)
        self.in_place, self.slots = found.in_place, found.slots
        self._filler = weight_source.filler(self.slots, plan)
        self.queue = weight_source.port.queue()

    def buffer(self, slot: int) -> Tensor:
        """Return the buffer of a slot."""
        return self._weight_source.buffers[slot % len(self._weight_source.buffers)]

    def fill(self, slot: int) -> None:
        """Queue the work that fills a slot."""
        self._filler.fill(slot, self.buffer(slot), self.queue)

    def spans(self) -> tuple[list[Span], list[int]]:
        """Return (spans, ends): the spans of the pieces in place and then of each slot in its buffer; `ends` has the
        number of spans up to the end of the pieces in place, and up to the end of each slot.
        """
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
