"""Pulls: copy the ranges of an offer's feeds out of the trainer's memory in their order, and sum what was copied.

A `Puller` prepares a feed's ranges for one destination: the engine's own tensors, or spare ones. A `Pull` runs the
pullers of all feeds side by side in one thread. Each feed has two queues of the device. Between start and end of a
pull, the only Python per range is the call that queues its copy, and ranges that are adjacent on both sides are one
copy. An intake's `done` rises only after a copy has ended. When a pull ends, for whatever reason, nothing that it
queued still runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

from torch import Tensor

from artd_schema.wire.direct import Feed, Run
from artd_workers.deadline import Deadline
from artd_workers.transfer.checksum import WORD, Span
from artd_workers.transfer.contracts import Mark, Port, PullError

if TYPE_CHECKING:
    from .ipc_feed import OpenFeed

Copy = tuple[int, int, int]
"""(to, from, bytes)."""
Grid = tuple[int, int, int, int, int]
"""(to, pitch, from, width, rows), the sizes in bytes: what `Queue.copy2d` takes."""


class Puller:
    """One feed's copies into one set of tensors. `addresses` has those of the tensors to fill, by index in the engine's
    table."""

    def __init__(self, port: Port, opened: OpenFeed, feed: Feed, itemsize: int, addresses: Sequence[int]) -> None:
        self.pid, self.gone = feed.pid, opened.gone
        self._intake, bases = opened.intake, opened.bases
        self._slots = [unit.slot for unit in feed.units]
        self._copies = [_join_copies(unit.runs, addresses, bases, itemsize) for unit in feed.units]
        self._grids = [_grids(unit.runs, addresses, bases, itemsize) for unit in feed.units]
        self._ends, self.spans = [0], list[Span]()
        for unit in feed.units:
            self.spans += [span_of(run, addresses, itemsize) for run in unit.runs]
            self._ends.append(len(self.spans))
        self._table = port.sums(self.spans)
        self.mover, self.summer = port.queue(), port.queue()

    def take(self, fence: int, deadline: Deadline) -> AbstractContextManager[None]:
        """Run `issue` for this fence inside the block."""
        return self._intake.take(fence, deadline)

    def issue(self, fence: int, sums: Tensor | None) -> Iterator[None]:
        """Queue each copy when its slot is filled, and its checksums unless `sums` [parts] is None. Yields whenever
        it must wait. Raises PullError.
        """
        behind: deque[Mark] = deque()
        intake = self._intake
        yield from self._wait(lambda: True, fence, behind)  # the pieces in place, too, are offered for this fence only
        for number, (slot, copies, grids) in enumerate(zip(self._slots, self._copies, self._grids, strict=True)):
            if slot >= 0:
                yield from self._wait(lambda slot=slot: intake.ready > slot, fence, behind)  # type: ignore[misc]
            for to, source, size in copies:
                self.mover.copy(to, source, size)
            for grid in grids:
                self.mover.copy2d(*grid)
            mark = self.mover.mark()
            if sums is not None:
                self.summer.after(mark)
                self.summer.sum(self._table, sums, (self._ends[number], self._ends[number + 1]))
            if slot >= 0:
                behind.append(mark)
                self._free(behind)
        yield from self._wait(lambda: not behind, fence, behind)

    def sum(self, sums: Tensor) -> None:
        """Add the checksums of what the tensors contain to `sums` [parts]."""
        self.summer.sum(self._table, sums, (0, self._ends[-1]))

    def _wait(self, until: Callable[[], bool], fence: int, behind: deque[Mark]) -> Iterator[None]:
        while not (self._intake.fence == fence and until()):
            self._free(behind)
            if self._intake.fence == fence and self._intake.failed:
                raise PullError(f"the trainer failed to fill its buffers (pid {self.pid}): see its log")
            yield

    def _free(self, behind: deque[Mark]) -> None:
        while behind and behind[0].done():
            behind.popleft()
            self._intake.done += 1


class Pull:
    """All feeds of an offer into one set of tensors. `poll_s` is how long to sleep when every feed waits; 0 does not
    sleep, because the caller has nothing else to do."""

    def __init__(self, pullers: Sequence[Puller], poll_s: float = 0.0) -> None:
        self._pullers, self._poll_s = tuple(pullers), poll_s

    @property
    def spans(self) -> list[Span]:
        """Spans of everything that is pulled, at its destination."""
        return [span for puller in self._pullers for span in puller.spans]

    def run(self, fence: int, deadline: Deadline, sums: Tensor | None) -> dict[str, float]:
        """Copy everything, and add the checksums to `sums` [parts] unless it is None. Returns named seconds. Raises
        PullError as soon as one feed fails or its process has ended.
        """
        began = time.perf_counter()
        try:
            with ExitStack() as taken:
                for puller in self._pullers:
                    taken.enter_context(puller.take(fence, deadline))
                self._issue(fence, deadline, sums)
        finally:  # queued copies read the trainer's memory, which the caller may close after an error
            copied = self._settle() - began
        return {"copied": copied, "summed": time.perf_counter() - began}

    def _issue(self, fence: int, deadline: Deadline, sums: Tensor | None) -> None:
        going = [(puller, puller.issue(fence, sums)) for puller in self._pullers]
        while going := [one for one in going if next(one[1], one) is None]:
            self._check(going[0][0], fence, deadline)
            if self._poll_s:
                time.sleep(self._poll_s)

    def sum(self, sums: Tensor) -> None:
        """Add the checksums of what the tensors contain to `sums` [parts], and wait for that."""
        for puller in self._pullers:
            puller.sum(sums)
        self._settle()

    def _settle(self) -> float:
        """Wait for all queued work. Returns the time when the copies were done."""
        for puller in self._pullers:
            puller.mover.settle()
        copied = time.perf_counter()
        for puller in self._pullers:
            puller.summer.settle()
        return copied

    def _check(self, late: Puller, fence: int, deadline: Deadline) -> None:
        for puller in self._pullers:
            if puller.gone():
                raise PullError(
                    f"the trainer's process ended before it had filled its buffers for fence {fence} (pid {puller.pid})"
                )
        if deadline.passed:
            raise PullError(
                f"{deadline.seconds:g} s passed before the trainer had filled its buffers for fence {fence} "
                f"(pid {late.pid})"
            )


def span_of(run: Run, addresses: Sequence[int], itemsize: int) -> Span:
    """Return the words of a run at their destination."""
    address, first, words = addresses[run.tensor] + run.at * itemsize, run.first * itemsize, run.count * itemsize
    if not run.width:
        return Span(address, first // WORD, words // WORD, run.part)
    pitch = run.pitch * itemsize // WORD
    return Span(address, first // WORD, words // WORD, run.part, 0, run.width * itemsize // WORD, pitch, pitch)


def _join_copies(runs: Sequence[Run], addresses: Sequence[int], bases: Sequence[int], itemsize: int) -> list[Copy]:
    """Return the copies of the contiguous runs. Adjacent runs of one tensor from one segment become one copy;
    neighbours in two allocations must not.
    """
    out: list[Copy] = []
    last = (-1, -1)
    for run in runs:
        if run.width:
            continue
        to, source = addresses[run.tensor] + run.at * itemsize, bases[run.segment] + run.byte
        size, here = run.count * itemsize, (run.tensor, run.segment)
        if here == last and out[-1][0] + out[-1][2] == to and out[-1][1] + out[-1][2] == source:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + size)
        else:
            out.append((to, source, size))
        last = here
    return out


def _grids(runs: Sequence[Run], addresses: Sequence[int], bases: Sequence[int], itemsize: int) -> list[Grid]:
    """Return the copies of the runs that are rows. Runs whose rows continue on both sides, as those of a layer's
    experts do, become one copy.
    """
    out: list[Grid] = []
    last: tuple[int, ...] = ()
    for run in runs:
        if not run.width:
            continue
        to, source = addresses[run.tensor] + run.at * itemsize, bases[run.segment] + run.byte
        width, pitch, rows = run.width * itemsize, run.pitch * itemsize, run.count // run.width
        here = (run.tensor, run.segment, width, pitch)
        before = out[-1] if here == last else None
        if before and to == before[0] + before[4] * pitch and source == before[2] + before[4] * width:
            out[-1] = (*before[:4], before[4] + rows)
        else:
            out.append((to, pitch, source, width, rows))
        last = here
    return out
