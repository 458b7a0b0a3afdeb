"""Feeding one engine from a process's weights: base weights in place, and a ring of buffers that is filled by the
engine's plan.

`Feeder` makes the offer of one (trainer spawn, engine spawn) pair and feeds its pushes. It owns the pair's page; or,
over NCCL, its end of the connection, and then nothing is read in place. A push is fed under `WeightLock.read` of its
version, and `feed` returns only when the engine has copied the last slot. A fence is fed once. Nothing here writes
memory of an engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

from artd_schema.paths import process_ticks
from artd_schema.wire.direct import Feed, Offer, Piece, Plan, Run, Segment, Unit
from artd_workers.deadline import Deadline
from artd_workers.transfer.atomic_file import write_whole
from artd_workers.transfer.contracts import Mark, Port, Wire
from artd_workers.transfer.ring import Page, slot_bytes

from .sender import Sender
from .weight_source import PushSchedule, WeightSource

_POLL_S, _IDLE_S = 0.00002, 0.0005
_ACTIVE_S = 0.01
"""After so many seconds without progress the feeder looks at the page less often: the engine may be draining its
requests, and a train step wants the interpreter.
"""


class Aborted(Exception):
    """The push ended before the engine had copied everything."""


class Outlet(Protocol):
    """Where a feed announces filled slots: a `ring.Page` for an engine that pulls, a `Sender` for one that receives.

    `ready` is the number of slots announced so far; the feed sets it. `done` is the number of slots whose buffers may
    be filled again.
    """

    ready: int

    @property
    def done(self) -> int: ...
    def begin(self, fence: int) -> None: ...
    def fail(self) -> None: ...
    def close(self) -> None: ...


class Feeder:
    """Makes one pair's offer and feeds its pushes. `folder` is the pair's, which the caller creates. `wire` is the
    connection over which the engine gets everything, or None if it pulls by CUDA IPC."""

    def __init__(self, weight_source: WeightSource, plan: Plan, folder: Path, wire: Wire | None = None) -> None:
        self._weight_source = weight_source
        self._schedule = PushSchedule(weight_source, plan, in_place=wire is None)
        self._aborted = threading.Event()
        self._pace = _Pace()
        self._path = folder / "page"
        self._sent: Feed | None = None
        self.outlet: Outlet = Page.make(self._path) if wire is None else self._sender(wire)

    def close(self) -> None:
        """Remove the page. The engine closes its mappings by itself; until then they pin this process's memory."""
        self._path.unlink(missing_ok=True)
        self.outlet.close()

    def abort(self) -> None:
        """End a feed that is under way, and feed nothing any more. Any thread."""
        self._aborted.set()

    def offer(self) -> Offer:
        """Return what the engine opens, when this process holds the whole model. Raises DeviceError when memory
        cannot be shared.
        """
        return Offer(
            itemsize=self._weight_source.dtype.itemsize, parts=self._schedule.plan.parts, feeds=(self.own_feed(),)
        )

    def own_feed(self) -> Feed:
        """Return this process's part of an offer. Raises DeviceError when memory cannot be shared."""
        return self._sent if self._sent is not None else self._ipc_feed()

    def _ipc_feed(self) -> Feed:
        schedule, segments, size = (
            self._schedule,
            _Segments(self._weight_source.port),
            self._weight_source.dtype.itemsize,
        )
        weights = [self._weight_source.weights[name] for name in schedule.plan.sources]
        in_place = tuple(_run(p, *segments.find(weights[p.source], p.begin * size)) for p in schedule.in_place)
        units = [Unit(-1, in_place)] if in_place else []
        for slot, fills in enumerate(schedule.slots):
            buffer = schedule.buffer(slot)
            units.append(Unit(slot, tuple(_run(f.piece, *segments.find(buffer, f.at * size)) for f in fills)))
        return Feed(segments=tuple(segments.found), units=tuple(units), page=str(self._path), **_process())

    def _sender(self, wire: Wire) -> Sender:
        buffers, size = self._weight_source.buffers, self._weight_source.dtype.itemsize
        units = tuple(
            Unit(slot, tuple(_run(f.piece, slot % len(buffers), f.at * size) for f in fills))
            for slot, fills in enumerate(self._schedule.slots)
        )
        segments = tuple(Segment(b"", buffer.nbytes) for buffer in buffers)
        feed = Feed(segments=segments, units=units, **_process())
        sender = Sender(wire, slot_bytes(feed, size), buffers)
        self._sent = msgspec.structs.replace(feed, nccl=sender.name)
        return sender

    def feed(self, fence: int, deadline: Deadline) -> None:
        """Fill the ring slot by slot, as fast as the engine empties it. Returns when the engine has copied
        everything. Raises TimeoutError, Aborted.
        """
        slots, buffers = len(self._schedule.slots), len(self._weight_source.buffers)
        self.outlet.begin(fence)
        self._pace = _Pace()
        behind: deque[Mark] = deque()
        try:
            for slot in range(slots):
                while self.outlet.done + buffers <= slot:
                    self._wait(behind, deadline)
                self._schedule.fill(slot)
                behind.append(self._schedule.queue.mark())
            while self.outlet.done < slots:
                self._wait(behind, deadline)
        except BaseException:
            self.outlet.fail()
            self._schedule.queue.settle()  # queued work reads weights that may change from now on
            raise

    def _wait(self, behind: deque[Mark], deadline: Deadline) -> None:
        while behind and behind[0].done():
            behind.popleft()
            self.outlet.ready += 1
        if self._aborted.is_set() or deadline.passed:
            text = f"the engine took only {self.outlet.done} of {len(self._schedule.slots)} buffers"
            raise Aborted(text) if self._aborted.is_set() else TimeoutError(text)
        time.sleep(self._pace.after(self.outlet.done, self.outlet.ready))


class _Pace:
    """Chooses the seconds between two looks at the page."""

    def __init__(self) -> None:
        self._seen, self._since = (0, 0), time.monotonic()

    def after(self, done: int, ready: int) -> float:
        now = time.monotonic()
        if (done, ready) != self._seen:
            self._seen, self._since = (done, ready), now
        return _POLL_S if now - self._since < _ACTIVE_S else _IDLE_S


class _Segments:
    """Numbers the allocations that contain tensors."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.found: list[Segment] = []
        self._numbers: dict[int, int] = {}
        self._of: dict[int, tuple[int, int]] = {}

    def find(self, tensor: Tensor, byte: int) -> tuple[int, int]:
        """Return (number, offset) of a byte of a tensor: its allocation, and bytes from the allocation's start."""
        at = tensor.data_ptr()
        if at not in self._of:
            handle, begin, size = self._port.share(tensor)
            if begin not in self._numbers:
                self._numbers[begin] = len(self.found)
                self.found.append(Segment(handle, size))
            self._of[at] = self._numbers[begin], at - begin
        number, within = self._of[at]
        return number, within + byte


def _process() -> dict[str, Any]:
    """Return the fields of `Feed` that name this process."""
    pid = os.getpid()
    return {"pid": pid, "ticks": process_ticks(pid) or 0}


def write_offer(offer: Offer, path: Path) -> None:
    """Write an offer for the engine's worker: completely, or not at all."""
    write_whole(path, msgspec.msgpack.encode(offer))


def _run(piece: Piece, segment: int, byte: int) -> Run:
    return Run(piece.tensor, piece.at, piece.part, piece.first, segment, byte, piece.count, piece.width, piece.pitch)
