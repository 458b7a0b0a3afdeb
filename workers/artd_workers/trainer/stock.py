"""Live pushes over the engine's own NCCL transfer calls: the trainer's side, without the engine's packages.

Purpose: `Sender` is one pair of trainer and engine spawn: it joins once and then sends a checkpoint's tensors for every push.
Owner of: the pair's communicator, the GPU queue it sends on, and its watchdog.
Invariants: whatever the engine or NCCL does, `join` and `send` end soon after their deadline or after `abort`; a sender that
failed once is dead for good, and its communicator is gone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from artd_schema.manifest import WeightEntry

from ..engines.stock import WORLD, chunks, leave_id, size_of
from .nccl import Communicator, Library, NcclError

_POLL_S = 0.0002
_ABORT_S = 5.0


class Watchdog:
    """Calls `bite(reason)` once, in a thread of its own: when a deadline has passed, or at `bark`."""

    def __init__(self, bite: Callable[[str], None]) -> None:
        self._bite = bite
        self._change = threading.Condition()
        self._reason = ""
        self._end: float | None = None
        self._seconds = 0.0
        self.bitten = threading.Event()
        threading.Thread(target=self._run, name="artd-stock-watch", daemon=True).start()

    @property
    def reason(self) -> str:
        """Why it has bitten or is about to; "" = it has not."""
        return self._reason

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """The body must end within `seconds` and not raise. Raises NcclError when it has bitten before."""
        if self._reason:
            raise NcclError(f"this pair was aborted: {self._reason}")
        self._set(time.monotonic() + seconds, seconds)
        try:
            yield
        except BaseException as error:
            self.bark(f"{type(error).__name__}: {error}")
            self.bitten.wait(_ABORT_S)
            raise
        self._set(None, 0.0)

    def bark(self, reason: str) -> None:
        with self._change:
            self._reason = self._reason or reason
            self._change.notify()

    def _set(self, end: float | None, seconds: float) -> None:
        with self._change:
            self._end, self._seconds = end, seconds
            self._change.notify()

    def _run(self) -> None:
        with self._change:
            while not self._reason:
                left = None if self._end is None else self._end - time.monotonic()
                if left is not None and left <= 0:
                    self._reason = f"it was not done within {self._seconds:.1f} s"
                else:
                    self._change.wait(left)
        try:
            self._bite(self._reason)
        finally:
            self.bitten.set()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Ahead of training's. One for all pairs: the memory that torch keeps for a stream is the next pair's too."""
    return torch.cuda.Stream(device, priority=-1)


class _Queue:
    """What packs and sends in order: a stream of a GPU; on a CPU, whatever is called is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    @property
    def handle(self) -> int:
        return 0 if self._stream is None else self._stream.cuda_stream

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """What torch does in the body is queued here."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Callable[[], bool]:
        """Whether all that was queued before is done."""
        if self._stream is None:
            return lambda: True
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query


class Sender:
    """rendezvous: file in which the engine finds the communicator's id; device: where tensors are packed. `abort` is for any
    thread, the rest for one at a time; whoever drops a sender aborts it first."""

    def __init__(self, rendezvous: Path, device: torch.device, library: Library | None = None) -> None:
        """Raises NcclError when torch has no NCCL."""
        self._rendezvous = rendezvous
        self._library = library or Library()
        self._queue = _Queue(device)
        self._communicator = Communicator(self._library)
        self._watchdog = Watchdog(self._communicator.abort)
        self.joined = False

    @property
    def dead(self) -> bool:
        """Whether it was aborted, or failed."""
        return bool(self._watchdog.reason)

    def join(self, timeout_s: float) -> None:
        """Leave the id and wait for the engine. Raises NcclError."""
        with self._watchdog.within(timeout_s), self._queue.use():
            unique_id = self._library.unique_id()
            leave_id(self._rendezvous, unique_id)
            self._communicator.join(unique_id, WORLD)
            warm = torch.zeros(1, device=self._queue.device)  # vLLM's side sums one number before anything else
            self._communicator.all_reduce(warm.data_ptr(), self._queue.handle)
            self._wait("ncclAllReduce")
        self.joined = True

    def send(self, table: Sequence[WeightEntry], tensors: Iterable[Tensor], timeout_s: float) -> None:
        """Broadcast `tensors`, one for each row of the table, on any device and complete when they are yielded; made on this
        device they may be made when asked for. Raises NcclError, ValueError for tensors that are not the table's."""
        with self._watchdog.within(timeout_s), self._queue.use():
            cut = chunks(table)
            room = max((sum(map(size_of, chunk)) for chunk in cut), default=0)
            buffer = torch.empty(room, dtype=torch.uint8, device=self._queue.device)
            source = iter(tensors)
            for chunk in cut:
                size = _pack(buffer, chunk, source)
                self._communicator.broadcast(buffer.data_ptr(), size, self._queue.handle)
                self._wait("ncclBroadcast")  # the engine loads it while the next is packed

    def abort(self, reason: str = "the push has ended") -> None:
        """End what is under way, and the pair; returns at once."""
        self._watchdog.bark(reason)

    def _wait(self, what: str) -> None:
        done = self._queue.mark()
        while not done():
            self._communicator.settled(what)
            time.sleep(_POLL_S)


def _pack(buffer: Tensor, chunk: Sequence[WeightEntry], source: Iterator[Tensor]) -> int:
    """Lay the chunk's tensors one behind the other; returns their bytes."""
    at = 0
    for entry in chunk:
        tensor = next(source, None)
        if tensor is None:
            raise ValueError(f"the weight table has {entry.name}, but there are no more tensors")
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != (entry.dtype, entry.shape):
            raise ValueError(f"{entry.name} is {found}, the weight table says {(entry.dtype, entry.shape)}")
        size = size_of(entry)
        buffer[at : at + size].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        at += size
    return at
