"""What trainer and engine rely on in each other's device code: contracts and errors, without an implementation.

`Port` is one device of this process (`device.Cuda` on a GPU, plain memory in tests), `Wire` one end of a connection between two
processes (`nccl_connection.Nccl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # what shares a page of memory needs no torch
    from torch import Tensor

    from .checksum import Span

HEADER_BYTES = 8
"""Size of the header of a push over a wire: its fence as an int64, before the first slot's message."""


class PullError(Exception):
    """A pull failed. The text says what it waited for, and what to do."""


class DeviceError(Exception):
    """A call of the CUDA runtime failed."""


class Mark(Protocol):
    """A place in a queue."""

    def done(self) -> bool:
        """Return whether all work that was queued before this mark is done."""


class Queue(Protocol):
    """Work that a device does in order, concurrently with other queues."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes between two addresses."""

    def copy2d(self, to: int, pitch: int, source: int, width: int, rows: int) -> None:
        """Queue a copy of contiguous rows of `width` bytes to rows that start `pitch` bytes apart."""

    def sum(self, table: Any, sums: Tensor, spans: tuple[int, int], copy: bool = False) -> None:
        """Add the checksums of spans i .. j - 1 of a table from `Port.sums` to sums [parts] (int64). `copy`: first
        copy each span from its other address.
        """

    def mark(self) -> Mark:
        """Record the current position in this queue."""

    def after(self, mark: Any) -> None:
        """Start what is queued from now on only when another queue's mark is done."""

    def settle(self) -> None:
        """Wait until all queued work is done."""


class Port(Protocol):
    """One device of this process."""

    def share(self, tensor: Tensor) -> tuple[bytes, int, int]:
        """Return (handle, start, bytes) of the allocation that contains a tensor. Raises DeviceError when it cannot
        be shared.
        """

    def open(self, handle: bytes) -> int:
        """Map another process's memory and return its address. Raises DeviceError."""

    def close(self, address: int) -> None:
        """Undo `open`. From now on the other process may free the memory."""

    def free(self) -> int:
        """Return how many bytes of the device's memory are free."""

    def queue(self) -> Queue:
        """Return a new queue."""

    def sums(self, spans: Sequence[Span]) -> Any:
        """Return a table of these spans for `Queue.sum`."""

    def wire(self) -> Wire:
        """Return one end of a new connection to another process's device. Raises NcclError when there can be none."""


class Wire(Protocol):
    """One end of a connection between two processes.

    Any thread may call `abort`, and one thread at a time the rest. All calls but `name`, `memory` and `close` must be
    inside `within`. They raise NcclError when the connection failed or was aborted.
    """

    joined: bool

    @property
    def reason(self) -> str:
        """Why the connection was aborted, or ""."""

    def name(self) -> bytes:
        """Return the name of a new connection (128 bytes), for whoever is to join it."""

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Abort the connection if the block raises or lasts longer than `seconds`, even when a call hangs."""

    def join(self, name: bytes, rank: int) -> None:
        """Wait until the other side is there."""

    def memory(self, size: int) -> Tensor:
        """Return new bytes that can be sent from and received into: uint8 [size]."""

    def use(self) -> AbstractContextManager[None]:
        """Queue torch's work of the block on the wire too."""

    def send(self, address: int, size: int) -> None:
        """Queue a message."""

    def recv(self, address: int, size: int) -> None:
        """Queue the receiving of the next message, which has exactly `size` bytes."""

    def mark(self) -> Mark:
        """Record the current position in the wire's queue."""

    def check(self) -> None:
        """Raise NcclError if the connection failed."""

    def abort(self, reason: str) -> None:
        """End whatever waits, and the connection; returns at once."""

    def close(self) -> None:
        """Abort the connection, and wait until its memory is not touched any more."""
