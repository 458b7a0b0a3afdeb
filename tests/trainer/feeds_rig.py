"""Two trainer processes and an engine of a few small tensors, over plain memory; the pieces of the two processes interleave.

A `Side` writes only its page and its own memory. Weights are any bits, NaN included.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artd_schema.paths import process_ticks
from artd_schema.wire.direct import Feed, Offer, Run, Segment, Unit
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import Gate
from artd_workers.engines.pull.session import Session
from artd_workers.transfer import checksum
from artd_workers.transfer.ring import Page
from tests.awake import wait_until
from tests.direct_rig import MemoryPort

SOON_S = 30.0
ROWS, WIDTH, CUT = 6, 24, 8
"""Elements of 2 bytes. The first process has columns 0 .. CUT - 1 of an expert, the second the others."""
TENSORS = {"experts": (3, ROWS, WIDTH), "qkv": (10, WIDTH), "norm": (WIDTH,)}
PARTS = {
    "expert.0": (ROWS, WIDTH),
    "expert.1": (ROWS, WIDTH),
    "expert.2": (ROWS, WIDTH),
    "qkv": (10, WIDTH),
    "norm": (WIDTH,),
}
BUFFERS, BUFFER = 2, ROWS * (WIDTH - CUT)
Row = tuple[int, int, int, int, int, int]
"""(tensor, at, part, first, width, rows): of a piece."""


def pieces(rank: int) -> tuple[list[Row], list[Row]]:
    """What lies ready, and what passes the ring: an expert each, but the last of the first process in two pieces."""
    left, width = (0, CUT) if rank == 0 else (CUT, WIDTH - CUT)
    experts = [(0, e * ROWS * WIDTH + left, e, left, width, ROWS) for e in range(3)]
    if rank == 0:
        half = (0, experts[2][1] + 2 * WIDTH, 2, left + 2 * WIDTH, width, ROWS - 2)
        return [(1, 0, 3, 0, 0, 4 * WIDTH), (2, 0, 4, 0, 0, WIDTH)], [*experts[:2], (*experts[2][:5], 2), half]
    return [(1, 4 * WIDTH, 3, 4 * WIDTH, 0, 6 * WIDTH), experts[0]], experts[1:]


class Side:
    """One trainer process. values: of the parts. `feed` is its part of a push, in a thread; edit: of its runs."""

    def __init__(
        self, rank: int, folder: Path, port: MemoryPort, edit: Callable[[Run], Run | None] = lambda run: run
    ) -> None:
        self.page = Page.make(folder / f"page-{rank}")
        self._lying, self._slots = pieces(rank)
        self._memory = torch.zeros(1024, dtype=torch.bfloat16)
        self._buffers = [torch.zeros(BUFFER, dtype=torch.bfloat16) for _ in range(BUFFERS)]
        self.port, self.edit = port, edit
        self.fill_slot: Callable[[int], None] = lambda slot: None

    def offer(self, pid: int | None = None) -> Feed:
        memory, at, segments = [self._memory, *self._buffers], 0, []
        for tensor in memory:
            handle, _, size = self.port.share(tensor)
            segments.append(Segment(handle, size))
        runs = []
        for piece in self._lying:
            runs.append(_run(piece, 0, 2 * at))
            at += runs[-1].count
        units = [Unit(-1, self._edited(runs))]
        units += [Unit(i, self._edited([_run(p, 1 + i % BUFFERS, 0)])) for i, p in enumerate(self._slots)]
        pid = pid or os.getpid()
        return Feed(
            pid=pid, ticks=process_ticks(pid) or 0, segments=tuple(segments), units=tuple(units),
            page=str(self.page.path),
        )  # fmt: skip

    def _edited(self, runs: list[Run]) -> tuple[Run, ...]:
        return tuple(new for run in runs if (new := self.edit(run)) is not None)

    def begin(self, fence: int, parts: list[Tensor]) -> None:
        self._memory.copy_(_padded(torch.cat([_of(piece, parts) for piece in self._lying]), len(self._memory)))
        self.page.begin(fence)

    def feed(self, fence: int, parts: list[Tensor], stop: threading.Event) -> None:
        """Fill buffers as they are emptied; returns when all were."""
        self.begin(fence, parts)
        for slot, piece in enumerate(self._slots):
            while self.page.done + BUFFERS <= slot and not stop.wait(0.0002):
                pass
            self.fill_slot(slot)
            if stop.is_set():
                return
            self._buffers[slot % BUFFERS].copy_(_padded(_of(piece, parts), BUFFER))
            self.page.ready += 1
        while self.page.done < len(self._slots) and not stop.wait(0.0002):
            pass


def _run(piece: Row, segment: int, byte: int) -> Run:
    tensor, at, part, first, width, rows = piece
    return Run(tensor, at, part, first, segment, byte, (width or 1) * rows, width, WIDTH if width else 0)


def _of(piece: Row, parts: list[Tensor]) -> Tensor:
    """Its elements, one behind the other."""
    _, _, part, first, width, rows = piece
    flat = parts[part].view(-1)
    if not width:
        return flat[first : first + rows]
    return torch.cat([flat[first + r * WIDTH : first + r * WIDTH + width] for r in range(rows)])


def _padded(tensor: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(tensor.view(torch.int16), (0, size - tensor.numel()), value=-1).view(torch.bfloat16)


class Team:
    """Two processes and an engine."""

    def __init__(self, folder: Path) -> None:
        self.port = MemoryPort()
        self.sides = [Side(rank, folder, self.port) for rank in (0, 1)]
        self.tensors = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for shape in TENSORS.values()]
        self.gate = Gate("i", 1)
        self.session = Session(self.gate, self.port, tuple(TENSORS), self.tensors)
        self.number = 0
        self.stop = threading.Event()
        self.renew()

    def renew(self) -> None:
        """Other weights: any bits."""
        generator = torch.Generator().manual_seed(self.number)
        self.parts = [
            torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
            for shape in PARTS.values()
        ]

    def offer(self, *sides: Side, pids: tuple[int | None, ...] = (None, None)) -> Offer:
        feeds = tuple(side.offer(pid) for side, pid in zip(sides or self.sides, pids, strict=False))
        return Offer(itemsize=2, parts=tuple(PARTS), feeds=feeds)

    def open(self, **rest: Any) -> None:
        self.session.open(self.offer(**rest))
        self.expect()

    def expect(self) -> None:
        self.session.expect({name: checksum.sum_of(part) for name, part in zip(PARTS, self.parts, strict=True)})

    def fence(self) -> Fence:
        self.number += 1
        return Fence("i", 1, self.number, self.number)

    def push(self, call: Callable[[Fence], Any], sides: list[Side] | None = None) -> Fence:
        """The call, with these sides feeding."""
        fence = self.fence()
        self.stop.clear()
        given = (fence.fence, self.parts, self.stop)
        threads = [threading.Thread(target=side.feed, args=given) for side in (self.sides if sides is None else sides)]
        for thread in threads:
            thread.start()
        try:
            call(fence)
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        return fence

    def pull(self, timeout_s: float = SOON_S, sides: list[Side] | None = None) -> None:
        self.push(lambda fence: self.session.pull(fence, timeout_s), sides)

    def stage(self, fence: Fence) -> None:
        self.session.stage(fence, SOON_S)
        wait_until(self.session.poll_staging, SOON_S)

    def same(self) -> bool:
        wanted = [torch.stack(self.parts[:3]), *self.parts[3:]]
        both = zip(self.tensors, wanted, strict=True)
        return all(torch.equal(tensor.view(torch.int16), one.view(torch.int16)) for tensor, one in both)
