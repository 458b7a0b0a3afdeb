"""Which sample of a group a body is that is submitted by value without a key: the first of its kind, the second, ...

Owner of: the numbers in use, of the bodies that came last. Invariants: two calls under way never have the same number; a
number whose call succeeded is not given again, whatever became of its group; one whose call failed is the next to be given
(whoever tries again means the same sample); never more than `kept` bodies are remembered.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

KEPT = 1 << 16  # some 20 MB


class _Numbers:
    __slots__ = ("failed", "next")

    def __init__(self) -> None:
        self.next = 0
        self.failed: list[int] = []


class Samples:
    """Of one run."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._bodies: OrderedDict[str, _Numbers] = OrderedDict()

    @contextmanager
    def number(self, body: str) -> Iterator[int]:
        """The number of a sample with this body (a digest of it and of its group), for the time of its call."""
        numbers = self._bodies.setdefault(body, _Numbers())
        self._bodies.move_to_end(body)
        if len(self._bodies) > self._kept:
            self._bodies.popitem(last=False)
        mine = heapq.heappop(numbers.failed) if numbers.failed else numbers.next
        numbers.next = max(numbers.next, mine + 1)
        try:
            yield mine
        except BaseException:
            heapq.heappush(numbers.failed, mine)
            raise
