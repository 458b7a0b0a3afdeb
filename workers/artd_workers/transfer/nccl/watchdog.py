"""A thread that aborts a communicator when a deadline has passed or when it is asked to, because NCCL calls can hang.

The watchdog bites once, and what it has bitten is not used again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from .communicator import NcclError

_ABORT_S = 5.0


class Watchdog:
    """Calls `bite(reason)` once, in a thread of its own: when a deadline has passed, or after `bark`."""

    def __init__(self, bite: Callable[[str], None]) -> None:
        self._bite = bite
        self._change = threading.Condition()
        self._reason = ""
        self._end: float | None = None
        self._seconds = 0.0
        self.bitten = threading.Event()
        threading.Thread(target=self._run, name="artd-nccl-watch", daemon=True).start()

    @property
    def reason(self) -> str:
        """Why it has bitten or is about to, or ""."""
        return self._reason

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Bite if the block raises or lasts longer than `seconds`. Raises NcclError when it has bitten before."""
        if self._reason:
            raise NcclError(f"this pair was aborted: {self._reason}")
        self._set(time.monotonic() + seconds, seconds)
        try:
            yield
        except BaseException as error:
            self.end(f"{type(error).__name__}: {error}")
            raise
        self._set(None, 0.0)

    def bark(self, reason: str) -> None:
        """Let it bite; returns at once."""
        with self._change:
            self._reason = self._reason or reason
            self._change.notify()

    def end(self, reason: str) -> None:
        """Let it bite, and wait until it has."""
        self.bark(reason)
        self.bitten.wait(_ABORT_S)

    def _set(self, end: float | None, seconds: float) -> None:
        with self._change:
            self._end, self._seconds = end, seconds
            self._change.notify()

    def _run(self) -> None:
        with self._change:
            while not self._reason:
                left = None if self._end is None else self._end - time.monotonic()
                if left is not None and left <= 0:
                    self._reason = f"it was not done within {self._seconds:.1f} s"
                else:
                    self._change.wait(left)
        try:
            self._bite(self._reason)
        finally:
            self.bitten.set()
