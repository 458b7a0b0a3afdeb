"""The engine's side of the direct push: one offer opened, pulls in place or staged, and the checksums that decide.

Purpose: `Session` is what an engine's worker extension calls. Owner of: the opened segments, the spare tensors, the pull
into them that is under way. Invariants: an update is finished at the gate only when every checksum is the manifest's, else
it stays open and the weights count as unknown; the engine's tensors keep their addresses, so that its graphs stay valid;
a new offer, `close`, or the end of the trainer's process closes every mapping (they would pin a dead trainer's memory), and
no mapping is closed while a pull reads from it: whoever calls holds the lock, and a pull ends by itself once the trainer has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artd_schema.direct import Offer

from ..base import Deadline, Fence
from ..fence import Gate
from . import checksum, cover
from .device import Port, Queue
from .pull import Puller, PullError, span_of
from .ring import Page
from .staging import Staging
from .watch import ProcessWatch

POLITE_S = 0.0005
"""Seconds between two looks at the page while the engine generates."""
MARGIN_BYTES = 2 << 30
"""Of the device that spare memory leaves free."""


class WrongWeights(Exception):
    """The engine's checksums are not the manifest's: the engine must not serve."""


class Session:
    """tensors: the engine's, in the order of its table; names: theirs."""

    def __init__(self, gate: Gate, port: Port, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._gate, self._port = gate, port
        self._names, self._tensors = tuple(names), tuple(tensors)
        self._offer: Offer | None = None
        self._bases: list[int] = []
        self._page: Page | None = None
        self._wanted = self._sums = torch.empty(0)
        self._spare: _Spare | None = None
        self._staging: Staging | None = None
        self._watch: ProcessWatch | None = None
        self._lock = threading.RLock()

    # ---- the offer ----------------------------------------------------------------------------------------------------

    def open(self, offer: Offer) -> dict[str, float]:
        """Open a trainer's segments in place of those of the one before. Raises CoverError, DeviceError, PullError."""
        began = time.perf_counter()
        with self._lock:
            self.close()
            self._check(offer)
            try:
                (feed,) = offer.feeds
                self._watch = ProcessWatch(feed.pid, feed.ticks, self._on_end)
                if self._watch.gone.is_set():
                    raise PullError(f"the trainer (pid {feed.pid}) that made this offer has ended")
                self._page = Page.open(Path(feed.page))
                for segment in feed.segments:
                    self._bases.append(self._port.open(segment.handle))
                self._take(offer, self._page)
            except BaseException:
                self.close()
                raise
            return {"seconds": time.perf_counter() - began, "segments": len(self._bases)}

    def _take(self, offer: Offer, page: Page) -> None:
        self._puller = self._puller_into(self._addresses(self._tensors), offer, page)
        self._sums = torch.zeros(len(offer.parts), dtype=torch.int64, device=self._tensors[0].device)
        self._wanted = torch.zeros_like(self._sums)
        self._offer = offer
        if self._spare is not None:
            self._spare = self._spare_for(self._spare.tensors)

    def close(self) -> None:
        """Close every mapping of the trainer's memory; waits for a pull that is under way. Any thread."""
        with self._lock:
            self._end_staging()
            self._offer = None
            if self._watch is not None:
                self._watch.stop()
                self._watch = None
            bases, self._bases = self._bases, []
            for base in bases:
                self._port.close(base)
            if self._page is not None:
                self._page.close()
                self._page = None

    def _on_end(self, watch: ProcessWatch) -> None:
        """The trainer's process has ended (in the watch's thread); a pull that waits for it ends by itself."""
        with self._lock:
            if self._watch is watch:
                self.close()

    def _check(self, offer: Offer) -> None:
        """Whether the offer fills this engine, each element once, from memory that it offers."""
        (feed,) = offer.feeds
        runs = [run for unit in feed.units for run in unit.runs]
        sizes = [tensor.numel() for tensor in self._tensors]
        cover.check("the engine's", self._names, sizes, ((run.tensor, run.at, run.count) for run in runs))
        for run in runs:
            if run.byte < 0 or run.byte + run.count * offer.itemsize > feed.segments[run.segment].size:
                raise cover.CoverError(f"{offer.parts[run.part]} lies outside of the memory that the trainer offers")
        if odd := [n for n, t in zip(self._names, self._tensors, strict=True) if t.element_size() != offer.itemsize]:
            raise cover.CoverError(f"{odd[0]} has other elements than the {offer.itemsize} bytes that are offered")

    # ---- a push -------------------------------------------------------------------------------------------------------

    def expect(self, sums: dict[str, int]) -> None:
        """The checksums that the next push must bring. Raises KeyError for a part without one."""
        with self._lock:
            self._wanted.copy_(checksum.expected(self._opened().parts, sums))

    def room(self) -> bool:
        """Whether the spare memory is there, or fits into the device."""
        return self._spare is not None or self._port.free() >= _size(self._tensors) + MARGIN_BYTES

    def pull(self, fence: Fence, timeout_s: float) -> dict[str, float]:
        """Copy the trainer's weights into the engine's tensors and check them; the engine is paused meanwhile. Returns
        seconds. Raises FenceError, PullError, WrongWeights."""
        with self._lock:
            self._opened()
            self._end_staging()
            self._gate.begin(fence, "direct")
            seconds = self._puller.run(fence.fence, Deadline(timeout_s), self._cleared())
            return seconds | self._finish()

    def stage(self, fence: Fence, timeout_s: float) -> dict[str, float]:
        """Begin to copy into spare memory beside the running engine; returns at once what that takes on the first call.
        Raises FenceError, PullError."""
        with self._lock:
            self._opened()
            self._end_staging()
            self._gate.admit(fence)
            if self._spare is None:
                self._spare = self._spare_for([torch.empty_like(tensor) for tensor in self._tensors])
            run = self._spare.puller.run
            self._staging = Staging(fence, lambda: run(fence.fence, Deadline(timeout_s), None))
            return {"spare_bytes": _size(self._spare.tensors)}

    def staged(self) -> dict[str, float]:
        """Seconds of the staging pull; empty while it is under way. Raises what it ended with."""
        staging = self._staging
        if staging is None:
            raise PullError("nothing is staged: no pull was begun, or the trainer's process has ended")
        return staging.result()

    def swap(self, fence: Fence) -> dict[str, float]:
        """Copy what was staged for this fence into the engine's tensors and check them, the engine being paused. Returns
        seconds. Raises FenceError, PullError, WrongWeights."""
        with self._lock:
            spare = self._spare
            if spare is None or self._staging is None or self._staging.fence != fence or not self._staging.result():
                raise PullError(f"nothing is staged for push {fence.push} fence {fence.fence}")
            self._gate.begin(fence, "direct")
            began = time.perf_counter()
            spare.queue.sum(spare.table, self._cleared(), (0, spare.spans), copy=True)
            spare.queue.settle()
            self._staging = None
            return {"summed": time.perf_counter() - began} | self._finish()

    def check(self) -> dict[str, float]:
        """Sum the engine's tensors as they are now. Returns seconds. Raises PullError, WrongWeights."""
        with self._lock:
            began = time.perf_counter()
            self._opened()
            self._puller.sum(self._cleared())
            return {"summed": time.perf_counter() - began} | self._compare()

    def drop_spare(self) -> None:
        """Give the spare memory back."""
        with self._lock:
            self._end_staging()
            self._spare = None

    # ---- parts --------------------------------------------------------------------------------------------------------

    def _end_staging(self) -> None:
        """Wait for a pull into spare memory, and forget it: two pulls at once would both write the page."""
        if self._staging is not None:
            self._staging.join()
            self._staging = None

    def _opened(self) -> Offer:
        if self._offer is None:
            raise PullError("no trainer's offer is open")
        return self._offer

    def _addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        return [tensor.data_ptr() for tensor in tensors]

    def _puller_into(self, addresses: Sequence[int], offer: Offer, page: Page, poll_s: float = 0.0) -> Puller:
        assert self._watch is not None
        (feed,) = offer.feeds
        return Puller(self._port, page, feed, offer.itemsize, addresses, self._bases, self._watch.gone.is_set, poll_s)

    def _spare_for(self, tensors: list[Tensor]) -> _Spare:
        """The open offer's way into these tensors and on into the engine's."""
        assert self._offer is not None and self._page is not None
        place, spare = self._addresses(self._tensors), self._addresses(tensors)
        spans = [
            span_of(r, place, self._offer.itemsize, spare) for unit in self._offer.feeds[0].units for r in unit.runs
        ]
        return _Spare(
            tensors, self._puller_into(spare, self._offer, self._page, POLITE_S), self._port.sums(spans), len(spans),
            self._port.queue(),
        )  # fmt: skip

    def _cleared(self) -> Tensor:
        self._sums.zero_()
        if self._sums.is_cuda:
            torch.cuda.current_stream().synchronize()  # the sums are made on another stream
        return self._sums

    def _finish(self) -> dict[str, float]:
        seconds = self._compare()
        self._gate.finish("direct")
        return seconds

    def _compare(self) -> dict[str, float]:
        began = time.perf_counter()
        wrong = checksum.wrong_parts(self._sums, self._wanted, self._opened().parts)
        if wrong:
            raise WrongWeights(
                f"{len(wrong)} of {len(self._sums)} tensors have other checksums than the manifest's, the first is "
                f"{wrong[0]}: the engine's weights are unknown, restart it"
            )
        return {"compared": time.perf_counter() - began}


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class _Spare:
    """Memory to stage in. puller: into it; table, spans, queue: of the copy from it into the engine's tensors."""

    tensors: list[Tensor]
    puller: Puller
    table: Any
    spans: int
    queue: Queue
