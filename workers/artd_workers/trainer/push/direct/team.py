"""What rank 0 and the other ranks say to each other during pushes, and rank 0's end of it.

`Team` speaks with all ranks that give a part of the model; `PeerParts` is their parts of one pair, and owns their
answers. Every wait has a limit. A rank's failure ends the push on all ranks, whenever it happens. A rank may hear
twice that a push has ended, but never fails to hear it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from artd_schema.wire.direct import Feed
from artd_workers.deadline import Deadline
from artd_workers.trainer.push.ways import Unable

from .feeder import Aborted

log = logging.getLogger(__name__)
OPEN_S = 60.0
"""Seconds that the other ranks get for plan and offer."""


class Open(Struct, frozen=True, tag=True):
    """Order: make your part of the pair at this rendezvous. The answer is Opened."""

    pair: str


class Give(Struct, frozen=True, tag=True):
    """Order: feed a push of the weights of `version` within `seconds`. The answer is Ended."""

    pair: str
    version: int
    fence: int
    seconds: float


class Abort(Struct, frozen=True, tag=True):
    """Order: end whatever waits in this pair."""

    pair: str


class Close(Struct, frozen=True, tag=True):
    """Order: abort, and give back what the pair holds."""

    pair: str


class Opened(Struct, frozen=True, tag=True):
    """The answer to Open. `feed` is the rank's offer; if it is None, `unable` says why."""

    pair: str
    feed: Feed | None
    unable: str = ""


class Ended(Struct, frozen=True, tag=True):
    """The answer to Give. `error` is "" if the engine has copied everything."""

    pair: str
    fence: int
    error: str = ""


Order = Open | Give | Abort | Close
Answer = Opened | Ended


class Line(Protocol):
    """A connection to one rank, such as `parallel.channel.Channel`."""

    def send(self, data: bytes) -> None: ...


class Team:
    """The ranks other than 0 that give a part. `lines` has a channel for each rank; the caller makes them and lets each
    call `take`. `lost` has the ranks whose processes have ended."""

    def __init__(self) -> None:
        self.lines: Mapping[int, Line] = {}
        self.lost: set[int] = set()
        self._pairs: dict[str, PeerParts] = {}

    def pair(self, name: str, failed: Callable[[], None]) -> PeerParts:
        """Return the other ranks' parts of a pair. `failed` is called, from another thread, when one rank's part of a
        push has failed.
        """
        self._pairs[name] = others = PeerParts(self, name, failed)
        return others

    def forget(self, name: str) -> None:
        self._pairs.pop(name, None)

    def tell(self, order: Order) -> None:
        """Send an order to all ranks; returns at once."""
        for line in self.lines.values():
            line.send(msgspec.msgpack.encode(order))

    def take(self, rank: int, data: bytes | None) -> None:
        """Handle what a rank says, or None when its process has ended."""
        if data is None:
            self.lost.add(rank)
            for others in list(self._pairs.values()):
                others.note_loss(rank)
            return
        answer = msgspec.msgpack.decode(data, type=Answer)
        if (pair := self._pairs.get(answer.pair)) is not None:
            pair.take(rank, answer)


class PeerParts:
    """The other ranks' parts of one pair. `error` says what went wrong on the first rank that failed. One thread at a
    time uses it; only `abort` may come from any thread."""

    def __init__(self, team: Team, name: str, failed: Callable[[], None]) -> None:
        self._team, self._name, self._failed = team, name, failed
        self._feeds: dict[int, Feed] = {}
        self._fence = -1
        self._busy: set[int] = set()
        self.error = ""
        self._aborted = False
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Order the ranks to make their parts; returns at once."""
        self.error = self._describe_loss()
        self._team.tell(Open(self._name))

    def await_feeds(self) -> tuple[Feed, ...]:
        """Return what the ranks offer, by rank. Raises Unable; Aborted when the push was aborted, or when a rank does
        not answer in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.error or self._aborted or self._whole, OPEN_S)
            if self.error:
                raise Unable(self.error)
            if not self._whole:
                raise Aborted(f"only {len(self._feeds)} of {len(self._team.lines)} other ranks have made their offers")
            return tuple(self._feeds[rank] for rank in sorted(self._feeds))

    @property
    def _whole(self) -> bool:
        return len(self._feeds) == len(self._team.lines)

    def give(self, version: int, fence: int, deadline: Deadline) -> None:
        """Order the ranks to feed a push; returns at once. Raises Aborted when the process of a rank has ended."""
        with self._changed:
            if gone := self._describe_loss():
                raise Aborted(gone)
            self._fence, self._busy = fence, set(self._team.lines)
        self._team.tell(Give(self._name, version, fence, deadline.left))

    def _describe_loss(self) -> str:
        return f"rank {min(self._team.lost)}: its process has ended" if self._team.lost else ""

    def await_end(self, seconds: float) -> str:
        """Wait until all ranks have ended their part. Returns what went wrong on the first rank that failed, or "".
        Raises TimeoutError.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, seconds):
                raise TimeoutError(f"rank {min(self._busy)} did not end its part of push fence {self._fence} in time")
            return self.error

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self._team.tell(Abort(self._name))

    def close(self) -> None:
        self._team.tell(Close(self._name))
        self._team.forget(self._name)

    def take(self, rank: int, answer: Answer) -> None:
        """Note a rank's answer. Runs in the line's thread."""
        with self._changed:
            if isinstance(answer, Opened):
                if answer.feed is not None:
                    self._feeds[rank] = answer.feed
                wrong = answer.unable
            elif answer.fence == self._fence:
                self._busy.discard(rank)
                wrong = answer.error
            else:
                return
            self._note(rank, wrong)
        self._tell(rank, wrong)

    def note_loss(self, rank: int) -> None:
        """Note that a rank's process has ended. Runs in the line's thread."""
        wrong = "its process has ended"
        with self._changed:
            asked = rank in self._busy or rank not in self._feeds
            self._busy.discard(rank)
            self._note(rank, wrong)
        self._tell(rank, wrong if asked else "")

    def _note(self, rank: int, wrong: str) -> None:
        if wrong and not self.error:
            self.error = f"rank {rank}: {wrong}"
        self._changed.notify_all()

    def _tell(self, rank: int, wrong: str) -> None:
        """Report a failure. The caller must not hold the lock: the report aborts the pair, which takes other locks."""
        if wrong:
            log.warning("push over %s: rank %d: %s", self._name, rank, wrong)
            self._failed()
