"""Time on a machine that is short of it: how long a test waits, and how long something took.

A test waits `SOON_S` for what has to happen. A bound that is a guarantee ("gone within 2 s") is measured by `Awake`: a thread
looks at the clock, and between two looks at most GAP_S count. While nothing ran here (the whole machine or a disk stood still),
the measured process did not run either. The daemon's leases count in the same way.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

SOON_S = 60.0
"""For what has to happen: only a test that fails waits so long."""
LOOK_S, GAP_S = 0.02, 0.1


async def until(condition: Callable[[], Any], seconds: float = SOON_S) -> None:
    """Return when it holds; what it gives may be awaitable. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(LOOK_S / 4)


def wait_until(condition: Callable[[], Any], seconds: float = SOON_S, what: str = "what is waited for") -> None:
    """`until` where no loop runs. Raises AssertionError."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no sign of {what} within {seconds} s"
        time.sleep(LOOK_S / 10)


class Awake:
    """A context manager. seconds: in which this process ran, so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="test-awake", daemon=True)

    def __enter__(self) -> Awake:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _count(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            self.seconds += min(now - looked, GAP_S)
            looked = now
