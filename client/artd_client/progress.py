"""What a call waits for, told to the person in front of the program.

Owner of: when something was last told. Invariants: one line of a client at a time, however many tasks wait; nothing is told of what
takes less than TELL_S.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

Tell = Callable[[str], None]
TELL_S = 5.0
AGAIN_S = 15.0
_NUMBERS = re.compile(r"[\d.]+( of [\d.]+)? MB|, \d+ s$")
"""What changes while the activity is the same."""


def to_stderr(text: str) -> None:
    print(f"artd: {text}", file=sys.stderr, flush=True)


class Progress:
    """tell: gets a line, such as `engine starting, 35 s`."""

    def __init__(self, tell: Tell | None) -> None:
        self.tell = tell
        self.waiter: object | None = None
        self._last = -AGAIN_S
        self._head = ""

    def poll_s(self, waiter: object, otherwise: float) -> float:
        """Seconds after which this waiter asks again: the first of a client's asks often and tells for all."""
        if self.tell is None or self.waiter not in (None, waiter):
            return otherwise
        self.waiter = waiter
        return min(TELL_S, otherwise)

    def leave(self, waiter: object) -> None:
        if self.waiter is waiter:
            self.waiter = None

    def say(self, waiter: object, text: str) -> None:
        """Tell, if this is the waiter that tells and it is new, or the last word was some time ago."""
        now, head = time.monotonic(), _NUMBERS.sub("", text)
        if self.tell is None or self.waiter is not waiter or not text:
            return
        if head != self._head or now - self._last >= AGAIN_S:
            self._head, self._last = head, now
            self.tell(text)
