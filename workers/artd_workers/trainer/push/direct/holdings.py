"""What a trainer process serves from, whoever asks: base weights, the frozen adapter, a ring of buffers.

Purpose: `Holdings` is shared by the checksums of a checkpoint and by every pair's `Source`; a `Lane` is one plan over it.
Owner of: the buffers, one set a process. Invariants: who uses a buffer has the turn of `Frozen`; nothing here writes any weight.
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
from .plan import alone, make_plan
from .schedule import Fill, schedule
from .weight_lock import Frozen

BUFFERS = 4
BUFFER_BYTES = 256 << 20


class Holdings:
    """codec: of what this process gives, which is all of the model unless there is a spread; weights: by its Megatron names (as
    `grouped.slots` gives them); dtype: as served; each: elements of a buffer."""

    def __init__(
        self, port: Port, codec: Codec, weights: Mapping[str, Tensor], frozen: Frozen, dtype: torch.dtype,
        buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES, spread: Spread | None = None,
    ) -> None:  # fmt: skip
        """Raises KeyError for a weight that is not there, ValueError for one that is not contiguous."""
        self.port, self.codec, self.frozen, self.dtype, self.spread = port, codec, frozen, dtype, spread
        self.weights = {row.megatron: weights[row.megatron].detach() for row in codec.rows}
        if odd := [name for name, tensor in self.weights.items() if not tensor.is_contiguous()]:
            raise ValueError(f"{odd[0]} is not contiguous: it cannot be pulled")
        self._count, self.each = buffers, buffer_bytes // dtype.itemsize
        self.device = next((tensor.device for tensor in self.weights.values()), frozen.flat.device)

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
        return (self.spread or alone(self.codec, self.shapes)).shapes

    def plan(self, table: EngineTable) -> Plan:
        """What this process gives to an engine. Raises PlanError, CoverError."""
        return make_plan(table, self.codec, self.shapes, self.dtype.itemsize, self.spread)

    @cached_property
    def buffers(self) -> tuple[Tensor, ...]:
        return tuple(torch.empty(self.each, dtype=self.dtype, device=self.device) for _ in range(self._count))

    def filler(self, turns: Sequence[Sequence[Fill]], plan: Plan) -> Filler:
        """Makes these turns of a plan."""
        weights = [self.weights[name] for name in plan.sources]
        if self.device.type == "cuda":
            from .merge_cuda import CudaFiller  # Triton exists only where there is a GPU

            return CudaFiller(turns, weights, plan.parts, self.frozen.adapter, self.frozen.flat, self.frozen.scale)
        return PlainFiller(turns, weights, plan.parts, self.frozen.adapter, self.frozen.scale)

    def made(self, plan: Plan, lying: bool = True) -> dict[int, int]:
        """Sources that pass the ring -> elements in a row: those with an adapter or of another dtype, and all that are trained
        themselves, for only a buffer's end of use is known. lying: others may be read as they lie; else all pass it."""
        adapter = self.frozen.adapter
        adapted = {piece.source for piece in plan.pieces if peft_names(plan.parts[piece.part])[0] in adapter}
        return {
            i: math.prod(tensor.shape[1:]) if tensor.ndim > 1 else tensor.numel()
            for i, tensor in enumerate(self.weights[name] for name in plan.sources)
            if not (lying and adapter) or i in adapted or tensor.dtype != self.dtype
        }

    def settle(self) -> None:
        """Wait for the device: what the training thread has queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Lane:
    """A plan's pieces: those that are read where they lie, and those that are made in the buffers, turn by turn. lying: as for
    `Holdings.made`."""

    def __init__(self, holdings: Holdings, plan: Plan, lying: bool = True) -> None:
        self._holdings, self.plan = holdings, plan
        found = schedule(plan, holdings.made(plan, lying), holdings.each)
        self.lying, self.turns = found.lying, found.turns
        self._filler = holdings.filler(self.turns, plan)
        self.queue = holdings.port.queue()

    def buffer(self, turn: int) -> Tensor:
        """Where a turn is made."""
        return self._holdings.buffers[turn % len(self._holdings.buffers)]

    def fill(self, turn: int) -> None:
        """Queue the making of a turn."""
        self._filler.fill(turn, self.buffer(turn), self.queue)

    def spans(self) -> tuple[list[Span], list[int]]:
        """Spans of what lies, then of each turn in its buffer; ends: of those that lie, and of each turn."""
        size = self._holdings.dtype.itemsize
        weights = [self._holdings.weights[name] for name in self.plan.sources]
        spans = [_span(p, weights[p.source].data_ptr() + p.begin * size, size) for p in self.lying]
        ends = [len(spans)]
        for turn, fills in enumerate(self.turns):
            spans += _spans(fills, self.buffer(turn).data_ptr(), size)
            ends.append(len(spans))
        return spans, ends


def _spans(fills: Iterable[Fill], base: int, size: int) -> list[Span]:
    return [_span(one.piece, base + one.at * size, size) for one in fills]


def _span(piece: Piece, address: int, size: int) -> Span:
    words = [n * size // WORD for n in (piece.first, piece.count, piece.width, piece.pitch)]
    return Span(address, words[0], words[1], piece.part, width=words[2], pitch=words[3])
