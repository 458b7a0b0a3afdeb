"""One pull: the ranges of a feed, copied out of the trainer's memory in their order, checksums behind them.

Purpose: `Puller` keeps a feed's ranges ready for one destination (the engine's own tensors, or spare ones) and runs pulls.
Owner of: two queues of its device. Invariants: no Python runs for each range between the begin and the end of a pull but the
issue of a copy, and ranges that lie together on both sides are one copy; the page's `done` rises only behind a copy's end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from artd_schema.direct import Feed, Run

from ..base import Deadline
from .checksum import WORD, Span
from .device import Mark, Port
from .ring import Intake

Copy = tuple[int, int, int]
"""(to, from, bytes)."""


class PullError(Exception):
    """A pull did not end: what was waited for, and what to do."""


class Puller:
    """addresses: of the tensors that are filled, by index in the engine's table; bases: of the feed's segments."""

    def __init__(
        self, port: Port, page: Intake, feed: Feed, itemsize: int, addresses: Sequence[int], bases: Sequence[int],
        gone: Callable[[], bool], poll_s: float = 0.0,
    ) -> None:  # fmt: skip
        """gone: whether the trainer's process has ended; poll_s: seconds to sleep between two looks at the page (0: none, the
        caller has nothing else to do)."""
        self._page, self._gone, self._poll_s = page, gone, poll_s
        self._turns = [unit.turn for unit in feed.units]
        self._copies = [_joined(unit.runs, addresses, bases, itemsize) for unit in feed.units]
        self._ends, spans = [0], []
        for unit in feed.units:
            spans += [span_of(run, addresses, itemsize) for run in unit.runs]
            self._ends.append(len(spans))
        self._table = port.sums(spans)
        self._mover, self._summer = port.queue(), port.queue()

    def run(self, fence: int, deadline: Deadline, sums: Tensor | None) -> dict[str, float]:
        """Copy everything; add the checksums to `sums` [parts] unless it is None. Returns named seconds. Raises PullError."""
        began = time.perf_counter()
        try:
            self._issue(fence, deadline, sums)
        finally:  # what was issued reads the trainer's memory, which the caller may close after an error
            self._mover.settle()
            copied = time.perf_counter() - began
            self._summer.settle()
        return {"copied": copied, "summed": time.perf_counter() - began}

    def _issue(self, fence: int, deadline: Deadline, sums: Tensor | None) -> None:
        behind: deque[Mark] = deque()
        self._wait(lambda: True, fence, behind, deadline)  # also what lies ready is offered for this fence only
        for number, (turn, copies) in enumerate(zip(self._turns, self._copies, strict=True)):
            if turn >= 0:
                self._wait(lambda turn=turn: self._page.ready > turn, fence, behind, deadline)  # type: ignore[misc]
            for to, source, size in copies:
                self._mover.copy(to, source, size)
            mark = self._mover.mark()
            if sums is not None:
                self._summer.after(mark)
                self._summer.sum(self._table, sums, (self._ends[number], self._ends[number + 1]))
            if turn >= 0:
                behind.append(mark)
                self._free(behind)
        self._wait(lambda: not behind, fence, behind, deadline)

    def sum(self, sums: Tensor) -> None:
        """Add the checksums of what lies there to `sums` [parts]."""
        self._summer.sum(self._table, sums, (0, self._ends[-1]))
        self._summer.settle()

    def _wait(self, until: Callable[[], bool], fence: int, behind: deque[Mark], deadline: Deadline) -> None:
        while not (self._page.fence == fence and until()):
            self._free(behind)
            if self._page.fence == fence and self._page.failed:
                raise PullError("the trainer failed to fill its buffers: see its log")
            if self._gone():
                raise PullError(f"the trainer's process ended before it had filled its buffers for fence {fence}")
            if deadline.passed:
                raise PullError(
                    f"{deadline.seconds:g} s passed before the trainer had filled its buffers for fence {fence}"
                )
            if self._poll_s:
                time.sleep(self._poll_s)

    def _free(self, behind: deque[Mark]) -> None:
        while behind and behind[0].done():
            behind.popleft()
            self._page.done += 1


def span_of(run: Run, addresses: Sequence[int], itemsize: int, others: Sequence[int] | None = None) -> Span:
    """The words of a run where they are to lie; others: addresses of tensors of the same shapes that they come from."""
    at = run.at * itemsize
    return Span(
        addresses[run.tensor] + at, run.first * itemsize // WORD, run.count * itemsize // WORD, run.part,
        others[run.tensor] + at if others else 0,
    )  # fmt: skip


def _joined(runs: Sequence[Run], addresses: Sequence[int], bases: Sequence[int], itemsize: int) -> list[Copy]:
    """Copies of the runs. Those of one tensor out of one segment are joined; neighbours in two allocations must not be."""
    out: list[Copy] = []
    last = (-1, -1)
    for run in runs:
        to, source = addresses[run.tensor] + run.at * itemsize, bases[run.segment] + run.byte
        size, here = run.count * itemsize, (run.tensor, run.segment)
        if here == last and out[-1][0] + out[-1][2] == to and out[-1][1] + out[-1][2] == source:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + size)
        else:
            out.append((to, source, size))
        last = here
    return out
