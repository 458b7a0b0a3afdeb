"""Sending the ring's buffers as messages to an engine that cannot map the trainer's memory.

The wire form is that of `engines.pull.nccl_feed`. A buffer may be filled again when its message has ended. `Sender`
owns the counts of what it has sent of the current push.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from artd_workers.transfer.contracts import HEADER_BYTES, Mark, Wire
from artd_workers.transfer.nccl.stock import TRAINER


class Sender:
    """`feeder.Outlet` over a connection. `sizes` has the bytes of each slot's message; `buffers` is the ring. Call it
    within `Wire.within`."""

    def __init__(self, wire: Wire, sizes: Sequence[int], buffers: Sequence[Tensor]) -> None:
        self.name = wire.name()
        self._wire, self._sizes, self._buffers = wire, sizes, buffers
        self._header = wire.memory(HEADER_BYTES)
        self._ready = self._done = 0
        self._behind: deque[Mark] = deque()

    def begin(self, fence: int) -> None:
        """Meet the engine if this is the first push, and send the header. Raises NcclError."""
        if not self._wire.joined:
            self._wire.join(self.name, TRAINER)
        self._ready = self._done = 0
        self._behind.clear()
        with self._wire.use():
            self._header.view(torch.int64).fill_(fence)
        self._wire.send(self._header.data_ptr(), HEADER_BYTES)

    @property
    def ready(self) -> int:
        """Number of slots that were sent or are on their way."""
        return self._ready

    @ready.setter
    def ready(self, count: int) -> None:
        for slot in range(self._ready, count):
            self._wire.send(self._buffers[slot % len(self._buffers)].data_ptr(), self._sizes[slot])
            self._behind.append(self._wire.mark())
        self._ready = count

    @property
    def done(self) -> int:
        """Number of slots whose message has ended. Raises NcclError."""
        self._wire.check()
        while self._behind and self._behind[0].done():
            self._wire.check()  # an aborted message looks done
            self._behind.popleft()
            self._done += 1
        return self._done

    def fail(self) -> None:
        """Tell the engine that the rest never comes, by aborting the connection."""
        self._wire.abort("the trainer cannot send the rest")

    def close(self) -> None:
        """End the connection."""
        self._wire.close()
