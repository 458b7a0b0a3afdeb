"""The page of shared memory by which a trainer fills a small ring of buffers and an engine empties it.

Purpose: say which buffers are full and which are free, across two processes, without a call. Owner of: a file of one page
below the runtime folder, mapped by both. Invariants: each word has one writer (`fence`, `ready` and `failed`: the trainer;
`done`: the engine) and is one aligned 64-bit store; within a fence the counters only rise. A page tells nothing about the
weights: what was copied counts only by its checksums.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from artd_schema.direct import Feed
from artd_workers.deadline import Deadline

from .contracts import PullError

BYTES = 4096
_FENCE, _READY, _DONE, _FAILED = range(4)


class Intake(Protocol):
    """What a pull sees of the ring, within `take`. fence: of the push that is fed; ready: buffers filled so far; failed: the rest
    never comes; done: buffers copied so far, set by the pull."""

    done: int

    @property
    def fence(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def take(self, fence: int, deadline: Deadline) -> AbstractContextManager[None]:
        """The pull of the push with this fence is the body."""


class Page:
    """Both sides' view of the page. `make` on the trainer's side, `open` on the engine's."""

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
        """A new page, nothing fed. Raises FileExistsError."""
        page = cls(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        page._words[_FENCE] = -1
        return page

    @classmethod
    def open(cls, path: Path) -> Page:
        """The trainer's page. Raises OSError when there is none."""
        return cls(path, os.O_RDWR)

    def take(self, fence: int, deadline: Deadline) -> AbstractContextManager[None]:
        """Nothing has to be asked for."""
        return nullcontext()

    def begin(self, fence: int) -> None:
        """Trainer: from now on the buffers are those of the push with this fence. Call it only when no pull is under way."""
        self._words[_READY] = self._words[_DONE] = self._words[_FAILED] = 0
        self._words[_FENCE] = fence  # written last: an engine that sees the fence sees the counters

    @property
    def fence(self) -> int:
        """Of the push that is fed, -1 before the first."""
        return self._words[_FENCE]

    @property
    def ready(self) -> int:
        """Buffers filled so far."""
        return self._words[_READY]

    @ready.setter
    def ready(self, count: int) -> None:
        self._words[_READY] = count

    @property
    def done(self) -> int:
        """Buffers copied so far: they may be filled again."""
        return self._words[_DONE]

    @done.setter
    def done(self, count: int) -> None:
        self._words[_DONE] = count

    @property
    def failed(self) -> bool:
        """The trainer cannot fill the rest."""
        return self._words[_FAILED] != 0

    def fail(self) -> None:
        self._words[_FAILED] = 1

    def close(self) -> None:
        """Unmap the page; the file stays (its maker removes it)."""
        self._words.release()
        self._map.close()


def slot_bytes(feed: Feed, itemsize: int) -> list[int]:
    """Bytes of each slot's message. Raises PullError for a feed that is not all slots, each in the buffer whose slot it is."""
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
