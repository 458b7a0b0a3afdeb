"""Where NCCL's calls of a process are queued, behind what torch does for them.

Owner of: one stream for each GPU, ahead of everything else on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


class Moment:
    """A place in a stream. event: None where all is done at once."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether all that was queued before it is done."""
        return self._event is None or self._event.query()


class Stream:
    """Does things in order, beside the device's other streams; on a CPU, whatever is called is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    @property
    def handle(self) -> int:
        """For NCCL."""
        return 0 if self._stream is None else self._stream.cuda_stream

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """What torch does in the body is queued here."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Moment:
        """Here."""
        if self._stream is None:
            return Moment(None)
        event: Any = torch.cuda.Event()
        event.record(self._stream)
        return Moment(event)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Ahead of training's. One for all pairs: the memory that torch keeps for a stream is the next pair's too."""
    return torch.cuda.Stream(device, priority=-1)
