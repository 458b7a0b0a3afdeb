"""The trainer's memory that an engine pulls from: its own tensors as they lie, and a ring of buffers that it fills.

Purpose: `Source` makes the offer of one (trainer spawn, engine spawn) pair, the manifest's checksums of a checkpoint, and
feeds pushes. Owner of: a copy of the adapter as it was staged, the buffers, the page. Invariants: what is fed are the
weights of the last `stage`, though the adapter is trained on meanwhile; a fence is fed once; nothing here writes any memory
of an engine. Full parameters lie as they are trained: the caller does not train while they are pulled.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from artd_schema.direct import Offer, Piece, Plan, Run, Segment, Unit

from ...engines.base import Deadline
from ...engines.direct.checksum import WORD, Span
from ...engines.direct.device import Mark, Port
from ...engines.direct.ring import Page
from ...models.codec import Codec, peft_names
from .fill import Filler, PlainFiller
from .schedule import schedule

BUFFERS = 4
BUFFER_BYTES = 256 << 20
_POLL_S = 0.00002


class Source:
    """weights: base weights by the codec's Megatron names (as `grouped.slots` gives them); adapter: the live fp32 masters by
    PEFT name (as `Lora.state` gives them; empty = full parameters); dtype: as served."""

    def __init__(
        self, port: Port, plan: Plan, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float,
        dtype: torch.dtype, folder: Path, buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES,
    ) -> None:  # fmt: skip
        self._port, self._plan, self._live = port, plan, adapter
        self._weights = [weights[name].detach() for name in plan.sources]
        if odd := [n for n, t in zip(plan.sources, self._weights, strict=True) if not t.is_contiguous()]:
            raise ValueError(f"{odd[0]} is not contiguous: it cannot be pulled")
        device = self._weights[0].device
        self._flat, self._staged = _copies(adapter, device)
        made = _made(plan, self._weights, adapter, dtype)
        each = buffer_bytes // dtype.itemsize
        self._schedule = schedule(plan, made, each)
        self._buffers = [torch.empty(each, dtype=dtype, device=device) for _ in range(buffers if made else 0)]
        self._filler = self._make_filler(scale)
        self._queue = port.queue()
        self._spans, self._ends = self._make_spans()
        self._sums = port.sums(self._spans)
        self._lock = threading.Lock()
        self.page = Page.make(folder / "page")

    def close(self) -> None:
        """Remove the page. The engine closes its mappings first: they pin this process's memory."""
        self.page.path.unlink(missing_ok=True)
        self.page.close()

    # ---- what is told -------------------------------------------------------------------------------------------------

    def offer(self) -> Offer:
        """What the engine opens. Raises DeviceError where memory cannot be shared."""
        segments = _Segments(self._port)
        size = self._buffers[0].element_size() if self._buffers else self._weights[0].element_size()
        lying = tuple(_run(p, *segments.find(self._weights[p.source], p.begin * size)) for p in self._schedule.lying)
        units = [Unit(-1, lying)] if lying else []
        for turn, fills in enumerate(self._schedule.turns):
            buffer = self._buffers[turn % len(self._buffers)]
            units.append(Unit(turn, tuple(_run(f.piece, *segments.find(buffer, f.at * size)) for f in fills)))
        return Offer(
            page=str(self.page.path), itemsize=size, segments=tuple(segments.found), parts=self._plan.parts,
            units=tuple(units),
        )  # fmt: skip

    def stage(self) -> dict[str, int]:
        """From now on feed the adapter as it is now; returns the checksums for the manifest, by Hugging Face name."""
        with self._lock:
            if self._staged:
                torch._foreach_copy_(list(self._staged.values()), [self._live[name] for name in self._staged])
            self._settle()
            sums = torch.zeros(len(self._plan.parts), dtype=torch.int64, device=self._weights[0].device)
            self._settle()
            self._queue.sum(self._sums, sums, (0, self._ends[0]))
            for turn in range(len(self._schedule.turns)):
                self._fill(turn)
                self._queue.sum(self._sums, sums, (self._ends[turn], self._ends[turn + 1]))
            self._queue.settle()
        return dict(zip(self._plan.parts, sums.tolist(), strict=True))

    # ---- a push -------------------------------------------------------------------------------------------------------

    def feed(self, fence: int, timeout_s: float) -> None:
        """Fill the buffers, turn by turn, as the engine empties them; the first ones at once. Raises TimeoutError."""
        deadline = Deadline(timeout_s)
        with self._lock:
            self.page.begin(fence)
            behind: deque[Mark] = deque()
            try:
                for turn in range(len(self._schedule.turns)):
                    while self.page.done + len(self._buffers) <= turn:
                        self._publish(behind, deadline)
                    self._fill(turn)
                    behind.append(self._queue.mark())
                while behind:
                    self._publish(behind, deadline)
            except BaseException:
                self.page.fail()
                raise

    def _publish(self, behind: deque[Mark], deadline: Deadline) -> None:
        while behind and behind[0].done():
            behind.popleft()
            self.page.ready += 1
        if deadline.passed:
            raise TimeoutError(f"the engine took only {self.page.done} of {len(self._schedule.turns)} buffers")
        time.sleep(_POLL_S)

    def _fill(self, turn: int) -> None:
        self._filler.fill(turn, self._buffers[turn % len(self._buffers)], self._queue)

    # ---- parts --------------------------------------------------------------------------------------------------------

    def _make_filler(self, scale: float) -> Filler:
        turns, parts = self._schedule.turns, self._plan.parts
        if self._weights[0].is_cuda:
            from .merge_cuda import CudaFiller  # Triton exists only where there is a GPU

            return CudaFiller(turns, self._weights, parts, self._staged, self._flat, scale)
        return PlainFiller(turns, self._weights, parts, self._staged, scale)

    def _make_spans(self) -> tuple[list[Span], list[int]]:
        """Spans of what lies, then of each turn's buffer; ends: of those that lie, and of each turn."""
        size = (self._buffers or self._weights)[0].element_size()
        spans = [_span(p, self._weights[p.source].data_ptr() + p.begin * size, size) for p in self._schedule.lying]
        ends = [len(spans)]
        for turn, fills in enumerate(self._schedule.turns):
            base = self._buffers[turn % len(self._buffers)].data_ptr()
            spans += [_span(f.piece, base + f.at * size, size) for f in fills]
            ends.append(len(spans))
        return spans, ends

    def _settle(self) -> None:
        if self._weights[0].is_cuda:
            torch.cuda.synchronize(self._weights[0].device)


class _Segments:
    """Numbers the allocations that tensors lie in."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.found: list[Segment] = []
        self._begins: list[int] = []
        self._of: dict[int, int] = {}

    def find(self, tensor: Tensor, byte: int) -> tuple[int, int]:
        """(number, bytes from its begin) of a byte of a tensor."""
        at = tensor.data_ptr()
        if at not in self._of:
            handle, begin, size = self._port.share(tensor)
            if begin not in self._begins:
                self._begins.append(begin)
                self.found.append(Segment(handle, size))
            self._of[at] = self._begins.index(begin)
        number = self._of[at]
        return number, at - self._begins[number] + byte


def write_offer(offer: Offer, path: Path) -> None:
    """For `DirectExtension.artd_direct_open`."""
    path.write_bytes(msgspec.msgpack.encode(offer))


def shapes(codec: Codec, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """What `plan.make_plan` asks of the trainer's tensors. Raises KeyError for a tensor that is not there."""
    return {row.megatron: tuple(weights[row.megatron].shape) for row in codec.rows}


def _run(piece: Piece, segment: int, byte: int) -> Run:
    return Run(piece.tensor, piece.at, piece.part, piece.first, segment, byte, piece.count)


def _span(piece: Piece, address: int, size: int) -> Span:
    return Span(address, piece.first * size // WORD, piece.count * size // WORD, piece.part)


def _copies(adapter: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """(flat fp32 buffer, its views by name) of the adapter's shapes."""
    flat = torch.empty(sum(tensor.numel() for tensor in adapter.values()), device=device)
    views, at = {}, 0
    for name, tensor in adapter.items():
        views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    return flat, views


def _made(plan: Plan, weights: Sequence[Tensor], adapter: Mapping[str, Tensor], dtype: torch.dtype) -> dict[int, int]:
    """Sources that need arithmetic -> elements in a row."""
    adapted = {piece.source for piece in plan.pieces if peft_names(plan.parts[piece.part])[0] in adapter}
    return {
        i: math.prod(tensor.shape[1:]) if tensor.ndim > 1 else tensor.numel()
        for i, tensor in enumerate(weights)
        if i in adapted or tensor.dtype != dtype
    }
