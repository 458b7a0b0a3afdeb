"""The page of shared memory through which a trainer fills a small ring of buffers and an engine empties it.

The page tells both processes which slots are filled and which are copied, without a call. It is a file of one page
below the runtime folder, which both map. Each word has one writer (`fence`, `ready` and `failed`: the trainer;
`done`: the engine), and each write is one aligned 64-bit store. Within a fence the counters only rise. The page
proves nothing about the weights: a copy counts only when its checksums match.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from artd_schema.wire.direct import Feed
from artd_workers.deadline import Deadline

from .contracts import PullError

BYTES = 4096
_FENCE, _READY, _DONE, _FAILED = range(4)


class Intake(Protocol):
    """The ring as a pull sees it, inside `take`.

    `fence` is that of the push that is fed. `ready` is the number of slots filled so far. `failed` says that the rest
    never comes. `done` is the number of slots copied so far; the pull sets it.
    """

    done: int

    @property
    def fence(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def take(self, fence: int, deadline: Deadline) -> AbstractContextManager[None]:
        """Run the pull of the push with this fence as the block."""


class Page:
    """The page as both sides see it. The trainer calls `make`, the engine `open`."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        descriptor = os.open(path, flags, 0o600)
        try:
            if flags & os.O_CREAT:
                os.ftruncate(descriptor, BYTES)
            self._map = mmap.mmap(descriptor, BYTES)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def make(cls, path: Path) -> Page:
        """Create a new page on which nothing is fed. Raises FileExistsError."""
        page = cls(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        page._words[_FENCE] = -1
        return page

    @classmethod
    def open(cls, path: Path) -> Page:
        """Open the trainer's page. Raises OSError when there is none."""
        return cls(path, os.O_RDWR)

    def take(self, fence: int, deadline: Deadline) -> AbstractContextManager[None]:
        """Do nothing: a pull of this page needs no preparation."""
        return nullcontext()

    def begin(self, fence: int) -> None:
        """Start a push: from now on the buffers hold the slots of this fence. The trainer calls it, and only when no
        pull is under way.
        """
        self._words[_READY] = self._words[_DONE] = self._words[_FAILED] = 0
        self._words[_FENCE] = fence  # written last: an engine that sees the fence sees the counters

    @property
    def fence(self) -> int:
        """Fence of the push that is fed; -1 before the first."""
        return self._words[_FENCE]

    @property
    def ready(self) -> int:
        """Number of slots filled so far."""
        return self._words[_READY]

    @ready.setter
    def ready(self, count: int) -> None:
        self._words[_READY] = count

    @property
    def done(self) -> int:
        """Number of slots copied so far: their buffers may be filled again."""
        return self._words[_DONE]

    @done.setter
    def done(self, count: int) -> None:
        self._words[_DONE] = count

    @property
    def failed(self) -> bool:
        """Whether the trainer cannot fill the rest."""
        return self._words[_FAILED] != 0

    def fail(self) -> None:
        """Record that the trainer cannot fill the rest."""
        self._words[_FAILED] = 1

    def close(self) -> None:
        """Unmap the page. The file stays; its maker removes it."""
        self._words.release()
        self._map.close()


def slot_bytes(feed: Feed, itemsize: int) -> list[int]:
    """Return the bytes of each slot's message. Raises PullError for a feed that is not all slots, each in the buffer
    of its number.
    """
    sizes: list[int] = []
    for number, unit in enumerate(feed.units):
        buffer = number % max(len(feed.segments), 1)
        if not feed.segments or unit.slot != number or not unit.runs or {run.segment for run in unit.runs} != {buffer}:
            raise PullError(
                f"unit {number} of the trainer's offer is not slot {number} of a ring of {len(feed.segments)}"
            )
        sizes.append(max(run.byte + run.count * itemsize for run in unit.runs))
        if sizes[-1] > feed.segments[buffer].size:
            raise PullError(f"slot {number} has {sizes[-1]} bytes, and its buffer {feed.segments[buffer].size}")
    return sizes
