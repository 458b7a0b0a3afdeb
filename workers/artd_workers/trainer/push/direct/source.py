"""The trainer's memory that one engine is given: base weights as they lie, and the ring of buffers, filled for its plan.

Purpose: `Source` makes the offer of one (trainer spawn, engine spawn) pair and feeds its pushes. Owner of: the pair's page, or its
end of the connection over which the buffers are sent: then nothing is read where it lies.
Invariants: a push is fed while its version of the weights is held (`Frozen.read`), and `feed` returns only when the engine has
copied the last buffer; a fence is fed once; nothing here writes any memory of an engine.
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

from artd_schema.direct import Feed, Offer, Piece, Plan, Run, Segment, Unit
from artd_schema.paths import process_ticks
from artd_workers.deadline import Deadline
from artd_workers.transfer.atomic_file import write_whole
from artd_workers.transfer.contracts import Mark, Port, Wire
from artd_workers.transfer.ring import Page, turns_of

from .holdings import Holdings, Lane
from .sender import Sender

_POLL_S, _IDLE_S = 0.00002, 0.0005
_ACTIVE_S = 0.01
"""The page is looked at seldom when nothing has moved for so long: the engine drains its requests, and a train step wants
the interpreter."""


class Aborted(Exception):
    """The push was over before the engine had taken all."""


class Outlet(Protocol):
    """What a feed gives its buffers by: a `ring.Page` to an engine that pulls, a `Sender` to one that receives. ready: buffers given
    so far, set by the feed; done: those that may be filled again."""

    ready: int

    @property
    def done(self) -> int: ...
    def begin(self, fence: int) -> None: ...
    def fail(self) -> None: ...
    def close(self) -> None: ...


class Source:
    """folder: of the pair, made by the caller; wire: over which the engine is sent everything (None: it pulls by CUDA IPC)."""

    def __init__(self, holdings: Holdings, plan: Plan, folder: Path, wire: Wire | None = None) -> None:
        self._holdings = holdings
        self._lane = Lane(holdings, plan, lying=wire is None)
        self._aborted = threading.Event()
        self._pace = _Pace()
        self._path = folder / "page"
        self._sent: Feed | None = None
        self.outlet: Outlet = Page.make(self._path) if wire is None else self._sender(wire)

    def close(self) -> None:
        """Remove the page. The engine closes its mappings by itself: they pin this process's memory."""
        self._path.unlink(missing_ok=True)
        self.outlet.close()

    def abort(self) -> None:
        """End a feed that is under way, from any thread; nothing is fed any more."""
        self._aborted.set()

    def offer(self) -> Offer:
        """What the engine opens, where this process has the whole model. Raises DeviceError where memory cannot be shared."""
        return Offer(itemsize=self._holdings.dtype.itemsize, parts=self._lane.plan.parts, feeds=(self.given(),))

    def given(self) -> Feed:
        """This process's part of an offer. Raises DeviceError where memory cannot be shared."""
        return self._sent if self._sent is not None else self._shared()

    def _shared(self) -> Feed:
        lane, segments, size = self._lane, _Segments(self._holdings.port), self._holdings.dtype.itemsize
        weights = [self._holdings.weights[name] for name in lane.plan.sources]
        lying = tuple(_run(p, *segments.find(weights[p.source], p.begin * size)) for p in lane.lying)
        units = [Unit(-1, lying)] if lying else []
        for turn, fills in enumerate(lane.turns):
            buffer = lane.buffer(turn)
            units.append(Unit(turn, tuple(_run(f.piece, *segments.find(buffer, f.at * size)) for f in fills)))
        return Feed(segments=tuple(segments.found), units=tuple(units), page=str(self._path), **_process())

    def _sender(self, wire: Wire) -> Sender:
        buffers, size = self._holdings.buffers, self._holdings.dtype.itemsize
        units = tuple(
            Unit(turn, tuple(_run(f.piece, turn % len(buffers), f.at * size) for f in fills))
            for turn, fills in enumerate(self._lane.turns)
        )
        segments = tuple(Segment(b"", buffer.nbytes) for buffer in buffers)
        feed = Feed(segments=segments, units=units, **_process())
        sender = Sender(wire, turns_of(feed, size), buffers)
        self._sent = msgspec.structs.replace(feed, nccl=sender.name)
        return sender

    def feed(self, fence: int, deadline: Deadline) -> None:
        """Fill the buffers, turn by turn, as the engine empties them, the first ones at once; returns when it has copied all.
        Raises TimeoutError, Aborted."""
        turns, buffers = len(self._lane.turns), len(self._holdings.buffers)
        self.outlet.begin(fence)
        self._pace = _Pace()
        behind: deque[Mark] = deque()
        try:
            for turn in range(turns):
                while self.outlet.done + buffers <= turn:
                    self._wait(behind, deadline)
                self._lane.fill(turn)
                behind.append(self._lane.queue.mark())
            while self.outlet.done < turns:
                self._wait(behind, deadline)
        except BaseException:
            self.outlet.fail()
            self._lane.queue.settle()  # what was queued reads weights that may change from now on
            raise

    def _wait(self, behind: deque[Mark], deadline: Deadline) -> None:
        while behind and behind[0].done():
            behind.popleft()
            self.outlet.ready += 1
        if self._aborted.is_set() or deadline.passed:
            text = f"the engine took only {self.outlet.done} of {len(self._lane.turns)} buffers"
            raise Aborted(text) if self._aborted.is_set() else TimeoutError(text)
        time.sleep(self._pace.after(self.outlet.done, self.outlet.ready))


class _Pace:
    """Seconds between two looks at the page."""

    def __init__(self) -> None:
        self._seen, self._since = (0, 0), time.monotonic()

    def after(self, done: int, ready: int) -> float:
        now = time.monotonic()
        if (done, ready) != self._seen:
            self._seen, self._since = (done, ready), now
        return _POLL_S if now - self._since < _ACTIVE_S else _IDLE_S


class _Segments:
    """Numbers the allocations that tensors lie in."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.found: list[Segment] = []
        self._numbers: dict[int, int] = {}
        self._of: dict[int, tuple[int, int]] = {}

    def find(self, tensor: Tensor, byte: int) -> tuple[int, int]:
        """(number, bytes from its begin) of a byte of a tensor."""
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
    """`Feed`'s words for this one."""
    pid = os.getpid()
    return {"pid": pid, "ticks": process_ticks(pid) or 0}


def write_offer(offer: Offer, path: Path) -> None:
    """For the engine's worker, whole or not at all."""
    write_whole(path, msgspec.msgpack.encode(offer))


def _run(piece: Piece, segment: int, byte: int) -> Run:
    return Run(piece.tensor, piece.at, piece.part, piece.first, segment, byte, piece.count, piece.width, piece.pitch)
