"""Watches whether an engine that has requests computes anything, by looking at its marks again and again.

A kernel that never ends, a deadlock or a stopped engine leaves a server that still answers `/health`. Only time in which this
process itself was awake counts, and no time in which there was nothing to compute or a push had paused the engine (`busy`). A
server that does not answer has made no progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from artd_workers.engines.adapter import EngineError

LOOK_S = 5.0
ANSWER_S = 5.0
"""Seconds that a server may take to report its work."""


class Work(NamedTuple):
    """What an engine reports of itself.

    `requests`: the number of requests that it owes an answer to. `mark`: changes with every step that it computes, also in the
    middle of a long prompt. `asleep`: it is paused on purpose.
    """

    requests: int
    mark: str
    asleep: bool = False


class Standstill:
    """Measures how long an engine has made no progress. More than `limit_s` seconds are too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last: Work | None = None
        self.seconds = 0.0

    def look(self, work: Work | None, passed: float) -> str:
        """Return why the engine must be ended, or "". `work`: None when it did not answer; `passed`: seconds since the last
        look."""
        if work is not None and (not work.requests or work.asleep or (self._last and work.mark != self._last.mark)):
            self.seconds = 0.0
        elif self._last is not None or work is None:
            self.seconds += passed
        self._last = work or self._last
        if self.seconds <= self._limit_s:
            return ""
        what = f"while {work.requests} requests waited for it" if work else "and its server answered nothing"
        return f"the engine computed no token for {self.seconds:.0f} s {what} (limits.engine_stall_s)"

    def reset(self) -> None:
        """Start again from zero: the engine had a reason to stand still."""
        self._last, self.seconds = None, 0.0


def watch(ask: Callable[[], Work], busy: Callable[[], bool], limit_s: float, over: threading.Event) -> str:
    """Return why the engine must be ended, or "" once `over` is set. `ask` raises EngineError; `busy()`: a push is under way."""
    look_s = min(LOOK_S, limit_s / 5)
    standstill, looked = Standstill(limit_s), time.monotonic()
    while not over.wait(look_s):
        pushing = busy()
        try:
            work = ask()
        except EngineError:
            work = None
        now = time.monotonic()
        passed, looked = min(now - looked, look_s + ANSWER_S), now
        if pushing or busy():
            standstill.reset()
        elif why := standstill.look(work, passed):
            return why
    return ""
