"""Notice at once that another process has ended. Linux only (pidfd).

An engine that maps a trainer's memory pins it, even after the trainer has died, and must then close its mappings.
Each watch owns a thread and two descriptors.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from artd_schema.paths import process_ticks


class ProcessWatch:
    """Watches one process until `stop`. When the process has ended, it sets `gone` and calls `then` in a thread of its
    own.

    `pid` and `ticks` are the process and its start time in clock ticks. A process that does not exist has ended, and so
    has one whose pid now belongs to another process.
    """

    def __init__(self, pid: int, ticks: int, then: Callable[[ProcessWatch], None]) -> None:
        self.gone = threading.Event()
        self._then = then
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._process = _open_pidfd(pid, ticks)
        if self._process < 0:
            self.gone.set()
        threading.Thread(target=self._watch, name="artd-trainer-watch", daemon=True).start()

    def stop(self) -> None:
        """End the watch: `then` is not called any more, unless it has begun. Call this exactly once, from any thread
        or from `then` itself.
        """
        os.eventfd_write(self._stop, 1)

    def _watch(self) -> None:
        try:
            if self._process >= 0 and not self._ended():
                return
            self.gone.set()
            self._then(self)
        finally:
            os.close(self._stop)
            if self._process >= 0:
                os.close(self._process)

    def _ended(self) -> bool:
        """Wait until the process has ended. Returns False when the watch was stopped before."""
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        return self._stop not in {descriptor for descriptor, _ in poller.poll()}


def _open_pidfd(pid: int, ticks: int) -> int:
    """Return a pidfd, or -1 when the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if process_ticks(pid) == ticks:
        return descriptor
    os.close(descriptor)
    return -1
