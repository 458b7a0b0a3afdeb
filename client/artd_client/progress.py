"""Tells the user of a program what a long call waits for.

A client prints one line at a time, however many tasks wait. A call that takes less than TELL_S prints nothing.
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
"""Numbers that change while the activity stays the same."""


def to_stderr(text: str) -> None:
    """Print a line of progress to stderr."""
    print(f"artd: {text}", file=sys.stderr, flush=True)


class Progress:
    """Decides which waiting call prints, and when. `tell` gets a line such as `engine starting, 35 s`."""

    def __init__(self, tell: Tell | None) -> None:
        self.tell = tell
        self.waiter: object | None = None
        self._last = -AGAIN_S
        self._head = ""

    def poll_s(self, waiter: object, otherwise: float) -> float:
        """Return the seconds after which this waiter asks the daemon again. A client's first waiter asks often and prints for
        all."""
        if self.tell is None or self.waiter not in (None, waiter):
            return otherwise
        self.waiter = waiter
        return min(TELL_S, otherwise)

    def leave(self, waiter: object) -> None:
        """Let another waiter print: this one has ended."""
        if self.waiter is waiter:
            self.waiter = None

    def say(self, waiter: object, text: str) -> None:
        """Print `text` if this waiter is the one that prints, and the text is new or the last line is some time ago."""
        now, head = time.monotonic(), _NUMBERS.sub("", text)
        if self.tell is None or self.waiter is not waiter or not text:
            return
        if head != self._head or now - self._last >= AGAIN_S:
            self._head, self._last = head, now
            self.tell(text)
