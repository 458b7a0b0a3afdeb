"""The direct push without CUDA IPC: a trainer's slots arrive as messages in a ring of the engine's own.

`NcclFeed` is an offer's feed over a `contracts.Wire`, and `Receiver` is what its pulls see of it. A feed owns the
engine's ring, its end of the connection, and a watch of the trainer's process when that runs on this machine. A
message goes only into a buffer that was copied. The two sides meet in a thread, and the engine receives only inside a
pull, so an engine that only generates waits for nobody. A pull that raises aborts the connection for good. Every wait
has a deadline.

Wire form: for each push its fence (int64), then each slot's used bytes, slot by slot.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor

from artd_schema.paths import process_ticks
from artd_schema.wire.direct import Feed
from artd_workers.deadline import Deadline
from artd_workers.transfer.contracts import HEADER_BYTES, Mark, Port, PullError, Wire
from artd_workers.transfer.nccl.communicator import NcclError
from artd_workers.transfer.nccl.stock import ENGINE
from artd_workers.transfer.process_watch import ProcessWatch
from artd_workers.transfer.ring import Intake, slot_bytes


class Receiver:
    """`ring.Intake` over a connection. `sizes` has the bytes of each slot's message, `bases` the addresses of the
    ring's buffers. `joining` is the thread in which the two sides meet, or None after they have met."""

    def __init__(
        self, wire: Wire, sizes: Sequence[int], bases: Sequence[int], joining: threading.Thread | None = None
    ) -> None:
        self._wire, self._sizes, self._bases, self._joining = wire, sizes, bases, joining
        self._header = wire.memory(HEADER_BYTES)
        self._expected = self._fence = -1
        self._posted = self._ready = self._done = 0
        self._marks: deque[Mark] = deque()

    @contextmanager
    def take(self, fence: int, deadline: Deadline) -> Iterator[None]:
        """Run the pull of this fence as the block. Raises PullError. Any exception ends the connection."""
        self._meet(deadline)
        with as_pull_error("the pull over NCCL"), self._wire.within(deadline.left):
            self._expected, self._fence = fence, -1
            self._posted = self._ready = self._done = 0
            self._wire.recv(self._header.data_ptr(), HEADER_BYTES)
            self._marks = deque([self._wire.mark()])
            yield

    def _meet(self, deadline: Deadline) -> None:
        if self._joining is not None:
            self._joining.join(deadline.left)
        if not self._wire.joined:
            self._wire.abort(f"{deadline.seconds:g} s passed")
            raise PullError(f"the trainer was not met over NCCL: {self._wire.reason}")

    @property
    def fence(self) -> int:
        """Fence of the push that the trainer sends; -1 before its header has arrived. Raises PullError for a fence
        other than the pull's.
        """
        self._look()
        return self._fence

    @property
    def ready(self) -> int:
        """Number of messages received so far. Raises PullError."""
        self._look()
        return self._ready

    @property
    def done(self) -> int:
        """Number of slots copied so far: their buffers may receive again."""
        return self._done

    @done.setter
    def done(self, count: int) -> None:
        self._done = count
        with as_pull_error("the pull over NCCL"):
            self._post()

    @property
    def failed(self) -> bool:
        """Always False: a failure raises PullError instead."""
        self._look()
        return False

    def _look(self) -> None:
        with as_pull_error("the pull over NCCL"):
            self._wire.check()
            while self._marks and self._marks[0].done():
                self._wire.check()  # an aborted message looks done
                self._marks.popleft()
                if self._fence < 0:
                    self._begin()
                else:
                    self._ready += 1

    def _begin(self) -> None:
        """Read the header, which has arrived, and post the first messages."""
        with self._wire.use():
            found = int(self._header.view(torch.int64))
        if found != self._expected:
            raise PullError(f"the trainer sends fence {found}, and the engine expects fence {self._expected}")
        self._fence = found
        self._post()

    def _post(self) -> None:
        while self._posted < min(self._done + len(self._bases), len(self._sizes)):
            self._wire.recv(self._bases[self._posted % len(self._bases)], self._sizes[self._posted])
            self._marks.append(self._wire.mark())
            self._posted += 1


class NcclFeed:
    """`ipc_feed.OpenFeed` over a connection.

    `bases` has the addresses of the ring's buffers, in this process. If the trainer's process runs on this machine,
    `on_end` is called in a thread of its own when that process has ended.
    """

    def __init__(
        self, port: Port, feed: Feed, on_end: Callable[[], None], deadline: Deadline, itemsize: int
    ) -> None:  # fmt: skip
        """Begin to meet the trainer. The first pull waits for that, until `deadline`. Raises PullError."""
        sizes = slot_bytes(feed, itemsize)
        self._over = threading.Event()
        with ExitStack() as stack, as_pull_error("no connection over NCCL"):
            self._wire, self._on_end, self._ring = port.wire(), on_end, list[Tensor]()
            stack.callback(self._ring.clear)
            stack.callback(self._wire.close)
            if process_ticks(feed.pid) == feed.ticks:
                stack.callback(ProcessWatch(feed.pid, feed.ticks, self._abort).stop)
            self._ring += _ring(self._wire, [segment.size for segment in feed.segments])
            self.bases = [buffer.data_ptr() for buffer in self._ring]
            meeting = (feed.nccl, deadline.left)
            joining = threading.Thread(target=self._join, args=meeting, name="artd-nccl-join", daemon=True)
            self.intake: Intake = Receiver(self._wire, sizes, self.bases, joining)
            joining.start()
            self.close = stack.pop_all().close

    def gone(self) -> bool:
        """Return whether the trainer's process has ended, as far as this machine can see. The intake reports what
        happens to the connection."""
        return self._over.is_set()

    def _join(self, name: bytes, seconds: float) -> None:
        """Meet the trainer. This runs in a thread: NCCL takes a second or two, and the engine generates meanwhile."""
        with suppress(NcclError), self._wire.within(seconds):  # the next pull reports why the connection is dead
            self._wire.join(name, ENGINE)

    def _abort(self, _: ProcessWatch) -> None:
        self._over.set()
        self._wire.abort("the trainer's process has ended")
        self._on_end()


def _ring(wire: Wire, sizes: Sequence[int]) -> list[Tensor]:
    try:
        return [wire.memory(size) for size in sizes]
    except RuntimeError as error:  # torch raises this when the device has no memory left
        raise PullError(f"the device has no room for the {sum(sizes)}-byte ring: {error}") from error


@contextmanager
def as_pull_error(what: str) -> Iterator[None]:
    """Turn an NcclError of the block into a PullError. `what`: what the block does."""
    try:
        yield
    except NcclError as error:
        raise PullError(f"{what}: {error}") from error
