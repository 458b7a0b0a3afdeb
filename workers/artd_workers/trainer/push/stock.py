"""Live pushes over the engine's own NCCL transfer calls: the trainer's side, which needs none of the engine's
packages.

`Sender` is one pair of trainer spawn and engine spawn: it joins once, and then sends a checkpoint's tensors for every
push. It owns the pair's communicator, the CUDA stream on which it sends, and a watchdog. Whatever the engine or NCCL
does, `join` and `send` end soon after their deadline or after `abort`. A sender that has failed once stays dead, and
its communicator is destroyed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from artd_schema.data.manifest import WeightEntry
from artd_workers.transfer.nccl.communicator import Communicator, Library
from artd_workers.transfer.nccl.stock import WORLD, chunks, leave_id, size_of
from artd_workers.transfer.nccl.stream import Stream
from artd_workers.transfer.nccl.watchdog import Watchdog

_POLL_S = 0.0002


class Sender:
    """One pair's sender.

    `rendezvous` is the file in which the engine finds the communicator's id. `device` is where tensors are packed. Any
    thread may call `abort`, and one thread at a time the rest. Abort a sender before you drop it.
    """

    def __init__(self, rendezvous: Path, device: torch.device, library: Library | None = None) -> None:
        """Create the sender without connecting it. Raises NcclError if torch has no NCCL."""
        self._rendezvous = rendezvous
        self._library = library or Library()
        self._queue = Stream(device)
        self._communicator = Communicator(self._library)
        self._watchdog = Watchdog(self._communicator.abort)
        self.joined = False

    @property
    def dead(self) -> bool:
        """Whether the sender was aborted, or has failed."""
        return bool(self._watchdog.reason)

    def join(self, timeout_s: float) -> None:
        """Publish the id and wait for the engine. Raises NcclError."""
        with self._watchdog.within(timeout_s), self._queue.use():
            unique_id = self._library.unique_id()
            leave_id(self._rendezvous, unique_id)
            self._communicator.join(unique_id, WORLD)
            warm = torch.zeros(
                1, device=self._queue.device
            )  # the engine's side starts with an all-reduce of one number
            self._communicator.all_reduce(warm.data_ptr(), self._queue.handle)
            self._wait("ncclAllReduce")
        self.joined = True

    def send(self, table: Sequence[WeightEntry], tensors: Iterable[Tensor], timeout_s: float) -> None:
        """Broadcast `tensors`, one for each row of the table.

        They may be on any device, and must be complete when they are yielded; tensors of this device may be made on
        demand. Raises NcclError, and ValueError for tensors that do not match the table.
        """
        with self._watchdog.within(timeout_s), self._queue.use():
            cut = chunks(table)
            room = max((sum(map(size_of, chunk)) for chunk in cut), default=0)
            buffer = torch.empty(room, dtype=torch.uint8, device=self._queue.device)
            source = iter(tensors)
            for chunk in cut:
                size = _pack(buffer, chunk, source)
                self._communicator.broadcast(buffer.data_ptr(), size, self._queue.handle)
                self._wait("ncclBroadcast")  # the engine loads this chunk while the next is packed

    def abort(self, reason: str = "the push has ended") -> None:
        """End whatever is under way, and the pair; returns at once."""
        self._watchdog.bark(reason)

    def _wait(self, what: str) -> None:
        mark = self._queue.mark()
        while not mark.done():
            self._communicator.settled(what)
            time.sleep(_POLL_S)


def _pack(buffer: Tensor, chunk: Sequence[WeightEntry], source: Iterator[Tensor]) -> int:
    """Write the chunk's tensors one after the other into `buffer`. Returns their bytes."""
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
