"""`contracts.Wire` over NCCL: a communicator of two ranks, on the GPU's stream for NCCL.

It owns the communicator and its watchdog. Both sides send and receive in the same order. `join` passes one message,
so that NCCL has connected the two before a push needs it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from .communicator import Communicator, Library
from .stock import ENGINE, TRAINER, WORLD
from .stream import Moment, Stream
from .watchdog import Watchdog

_POLL_S = 0.0002
_WARM_BYTES = 8


class Nccl:
    """One end of an NCCL connection; see `contracts.Wire`."""

    def __init__(self, device: torch.device, library: Library | None = None) -> None:
        """Create the connection's end without connecting it. Raises NcclError if torch has no NCCL."""
        self._library = library or Library()
        self._stream = Stream(device)
        self._communicator = Communicator(self._library)
        self._watchdog = Watchdog(self._communicator.abort)
        self._other = ENGINE
        self.joined = False

    @property
    def reason(self) -> str:
        return self._watchdog.reason

    def name(self) -> bytes:
        return self._library.unique_id()

    def within(self, seconds: float) -> AbstractContextManager[None]:
        return self._watchdog.within(seconds)

    def join(self, name: bytes, rank: int) -> None:
        self._other = ENGINE if rank == TRAINER else TRAINER
        with self._stream.use():
            self._communicator.join(name, WORLD, rank)
            first = self.memory(_WARM_BYTES)
            (self.send if rank == TRAINER else self.recv)(first.data_ptr(), _WARM_BYTES)
            mark = self.mark()
            while not mark.done():
                self.check()
                time.sleep(_POLL_S)
        self.joined = True

    def memory(self, size: int) -> Tensor:
        with self._stream.use():  # memory of this stream: another stream may still use what it has freed
            return torch.empty(size, dtype=torch.uint8, device=self._stream.device)

    def use(self) -> AbstractContextManager[None]:
        return self._stream.use()

    def send(self, address: int, size: int) -> None:
        with self._stream.use():
            self._communicator.send(address, size, self._other, self._stream.handle)

    def recv(self, address: int, size: int) -> None:
        with self._stream.use():
            self._communicator.recv(address, size, self._other, self._stream.handle)

    def mark(self) -> Moment:
        return self._stream.mark()

    def check(self) -> None:
        self._communicator.settled("NCCL")

    def abort(self, reason: str) -> None:
        self._watchdog.bark(reason)

    def close(self) -> None:
        self._watchdog.end("it was closed")
