"""The CUDA stream on which a process queues its NCCL calls, and the torch work that comes before them.

There is one stream per GPU, with priority over all other work on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


class Moment:
    """A place in a stream. `event` is None on a CPU, where everything is done at once."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        """Return whether all work that was queued before this moment is done."""
        return self._event is None or self._event.query()


class Stream:
    """Runs work in order, concurrently with the device's other streams. On a CPU every call is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    @property
    def handle(self) -> int:
        """The stream's handle for NCCL."""
        return 0 if self._stream is None else self._stream.cuda_stream

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Queue torch's work of the block on this stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Moment:
        """Record the current position in this stream."""
        if self._stream is None:
            return Moment(None)
        event: Any = torch.cuda.Event()
        event.record(self._stream)
        return Moment(event)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the GPU's stream, which has priority over training's. All pairs share it, so that the next pair reuses
    the memory that torch keeps for a stream.
    """
    return torch.cuda.Stream(device, priority=-1)
