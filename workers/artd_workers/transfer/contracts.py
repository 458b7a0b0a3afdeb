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
"""Of a push over a wire: its fence as an int64, before the first slot's message."""


class PullError(Exception):
    """A pull did not end: what was waited for, and what to do."""


class DeviceError(Exception):
    """A call of the CUDA runtime failed."""


class Mark(Protocol):
    """A place in a queue."""

    def done(self) -> bool:
        """Whether all that was queued before it is done."""


class Queue(Protocol):
    """Work that is done in order, beside other queues."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy `size` bytes between addresses."""

    def copy2d(self, to: int, pitch: int, source: int, width: int, rows: int) -> None:
        """Copy rows of `width` bytes that lie together to where each begins `pitch` bytes behind the one before."""

    def sum(self, table: Any, sums: Tensor, spans: tuple[int, int], copy: bool = False) -> None:
        """Add the checksums of spans i .. j - 1 of what `Port.sums` made to sums [parts] (int64); copy: each from its other
        address, first."""

    def mark(self) -> Mark:
        """Here."""

    def after(self, mark: Any) -> None:
        """Do what is queued from now on only when the other queue's mark is done."""

    def settle(self) -> None:
        """Wait until all is done."""


class Port(Protocol):
    """One device of this process."""

    def share(self, tensor: Tensor) -> tuple[bytes, int, int]:
        """(handle, begin, bytes) of the memory that holds a tensor. Raises DeviceError when it cannot be shared."""

    def open(self, handle: bytes) -> int:
        """Address of another process's memory. Raises DeviceError."""

    def close(self, address: int) -> None:
        """Undo `open`: the other process may free the memory from now on."""

    def free(self) -> int:
        """Bytes of the device's memory that no process holds."""

    def queue(self) -> Queue:
        """A new queue."""

    def sums(self, spans: Sequence[Span]) -> Any:
        """Make spans ready for `Queue.sum`."""

    def wire(self) -> Wire:
        """One end of a new connection to another process's device. Raises NcclError where there can be none."""


class Wire(Protocol):
    """One end of a connection of two processes. `abort` is for any thread, the rest for one at a time, and but for `name`, `memory`
    and `close` within `within`. Calls raise NcclError when the connection failed or was aborted."""

    joined: bool

    @property
    def reason(self) -> str:
        """Why it was aborted; "" = it was not."""

    def name(self) -> bytes:
        """Of a new connection (128 bytes), for whoever is to join it."""

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """The body must end within `seconds` and not raise: else the connection is aborted, also while a call hangs."""

    def join(self, name: bytes, rank: int) -> None:
        """Wait until the other side is there."""

    def memory(self, size: int) -> Tensor:
        """New bytes that can be sent from and received into: uint8 [size]."""

    def use(self) -> AbstractContextManager[None]:
        """What torch does in the body is queued on the wire too."""

    def send(self, address: int, size: int) -> None:
        """Queue a message."""

    def recv(self, address: int, size: int) -> None:
        """Queue the receiving of the next message, which has this size."""

    def mark(self) -> Mark:
        """Here in the queue."""

    def check(self) -> None:
        """Raises NcclError, else does nothing."""

    def abort(self, reason: str) -> None:
        """End whatever waits, and the connection; returns at once."""

    def close(self) -> None:
        """The same, and waits for it: its memory is not touched any more."""
