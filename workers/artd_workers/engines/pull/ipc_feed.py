"""The engine's end of a feed: the memory from which it pulls, and the counters that say how far that memory is
filled.

`OpenFeed` is the contract. `IpcFeed` is a feed on this host (CUDA IPC), `nccl_feed.NcclFeed` one over NCCL. A feed
owns what it has opened, until `close`. The caller ends the pulls before it closes. A constructor that raises leaves
nothing open.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from artd_schema.wire.direct import Feed
from artd_workers.deadline import Deadline
from artd_workers.transfer.contracts import Port, PullError
from artd_workers.transfer.process_watch import ProcessWatch
from artd_workers.transfer.ring import Intake, Page

from .nccl_feed import NcclFeed


class OpenFeed(Protocol):
    """An open feed. `intake` says how far its buffers are filled. `bases` has the address of each of its segments."""

    intake: Intake
    bases: list[int]

    def gone(self) -> bool:
        """Return whether the other side has ended, and so fills nothing any more."""

    def close(self) -> None:
        """Let go of everything. Any thread, once."""


class IpcFeed:
    """A trainer process's own memory, mapped by CUDA IPC.

    `on_end` is called in a thread of its own when that process has ended: an open mapping pins the memory of a dead
    process.
    """

    def __init__(self, port: Port, feed: Feed, on_end: Callable[[], None]) -> None:
        """Open the feed. Raises PullError when the process has ended, DeviceError, and OSError when its page is gone."""
        self.bases: list[int] = []
        with ExitStack() as stack:
            watch = ProcessWatch(feed.pid, feed.ticks, lambda _: on_end())
            stack.callback(watch.stop)
            self.gone = watch.gone.is_set
            if self.gone():
                raise PullError(f"the trainer's process (pid {feed.pid}) that made this offer has ended")
            self.intake: Intake = (page := Page.open(Path(feed.page)))
            stack.callback(page.close)
            for segment in feed.segments:
                self.bases.append(port.open(segment.handle))
                stack.callback(port.close, self.bases[-1])
            self.close = stack.pop_all().close


def open_feed(port: Port, feed: Feed, on_end: Callable[[], None], deadline: Deadline, itemsize: int) -> OpenFeed:
    """Open a feed by its way. Raises what `IpcFeed` and `NcclFeed` raise."""
    return NcclFeed(port, feed, on_end, deadline, itemsize) if feed.nccl else IpcFeed(port, feed, on_end)
