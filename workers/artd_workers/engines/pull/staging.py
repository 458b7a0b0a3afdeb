"""A staged push: a pull into spare memory while the engine runs, and the copy from there into the engine's tensors.

Each `Staging` owns its thread. Spare tensors have the layout of the engine's, so what arrives in rows is copied on as
a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from artd_workers.engines.adapter import Fence
from artd_workers.transfer.checksum import WORD, Span
from artd_workers.transfer.contracts import Port

from .open_offer import OpenOffer

POLITE_S = 0.0005
"""Seconds between two looks at the page while the engine generates."""


class Spare:
    """A pull of an open offer into spare tensors, and the copy from them. The spare tensors have the layout of the
    engine's.
    """

    def __init__(self, port: Port, link: OpenOffer, tensors: Sequence[Tensor]) -> None:
        self.pull = link.into(tensors, POLITE_S)
        both = zip(link.pull.spans, self.pull.spans, strict=True)
        spans = join_rows([replace(place, other=spare.address) for place, spare in both])
        self._count, self._table, self._queue = len(spans), port.sums(spans), port.queue()

    def copy(self, sums: Tensor) -> None:
        """Copy into the engine's tensors, and add the checksums of what was written to `sums` [parts]."""
        self._queue.sum(self._table, sums, (0, self._count), copy=True)
        self._queue.settle()


def join_rows(spans: Sequence[Span]) -> list[Span]:
    """Return spans with the same words, each word in one span. Rows of one part that interleave without a gap become
    one span.
    """
    groups: dict[tuple[int, int, int], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.part, *_origins(span)), []).append(span)
    out: list[Span] = []
    for group in groups.values():
        first, count = min(span.first for span in group), sum(span.words for span in group)
        if any(span.width for span in group) and max(map(_end, group)) - first == count:
            begin = min(group, key=lambda span: span.first)
            out.append(Span(begin.address, first, count, begin.part, begin.other))
        else:
            out += group
    return out


def _origins(span: Span) -> tuple[int, int]:
    """Return the addresses at which the part's first word would be."""
    return span.address - span.first * WORD, span.other - span.first * WORD


def _end(span: Span) -> int:
    """Return the position after a span's last word."""
    rows = span.words // span.width - 1 if span.width else 0
    return span.first + rows * span.pitch + (span.width or span.words)


class Staging:
    """Runs a pull in a thread, from now on. `work` is the pull; it returns named seconds."""

    def __init__(self, fence: Fence, work: Callable[[], dict[str, float]]) -> None:
        self.fence = fence
        self._seconds: dict[str, float] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="artd-stage", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the pull has ended, well or not."""
        self._thread.join()

    def result(self) -> dict[str, float]:
        """Return the pull's named seconds, empty while it runs. Raises the error with which it ended."""
        if self._thread.is_alive():
            return {}
        if self._error is not None:
            raise self._error
        return self._seconds

    def _run(self, work: Callable[[], dict[str, float]]) -> None:
        try:
            self._seconds = work()
        except Exception as error:
            self._error = error
