"""An open offer of a trainer: its feeds, the pulls into the engine's tensors, and the checksums that decide.

`OpenOffer` owns the open feeds until `close`. An offer is opened only if it fills the engine's tensors, each element
exactly once, from the memory that it offers. `on_end` may be called at any time, even for an offer that is closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from artd_schema.wire.direct import Feed, Offer
from artd_workers.deadline import Deadline
from artd_workers.transfer import checksum, coverage
from artd_workers.transfer.contracts import Port

from .ipc_feed import open_feed
from .pull import Pull, Puller


class WrongWeights(Exception):
    """The engine's checksums differ from the manifest's: the engine must not serve."""


class OpenOffer:
    """An open offer. `tensors` are the engine's. `on_end` gets this offer when a process whose memory it maps has
    ended."""

    def __init__(
        self,
        port: Port,
        offer: Offer,
        tensors: Sequence[Tensor],
        on_end: Callable[[OpenOffer], None],
        deadline: Deadline,
    ) -> None:
        """Open every feed of the offer. Raises DeviceError, PullError, OSError."""
        self.offer, self._port = offer, port
        with ExitStack() as stack:
            self._opened = []
            for feed in offer.feeds:
                self._opened.append(open_feed(port, feed, lambda: on_end(self), deadline, offer.itemsize))
                stack.callback(self._opened[-1].close)
            self.pull = self.into(tensors)
            self._sums = torch.zeros(len(offer.parts), dtype=torch.int64, device=tensors[0].device)
            self._wanted = torch.zeros_like(self._sums)
            self.close = stack.pop_all().close

    @property
    def segments(self) -> int:
        """Number of segments of all feeds."""
        return sum(len(one.bases) for one in self._opened)

    def into(self, tensors: Sequence[Tensor], poll_s: float = 0.0) -> Pull:
        """Return a pull into tensors of the engine's shapes; see `Pull`."""
        addresses, size = [tensor.data_ptr() for tensor in tensors], self.offer.itemsize
        both = zip(self._opened, self.offer.feeds, strict=True)
        return Pull([Puller(self._port, opened, feed, size, addresses) for opened, feed in both], poll_s)

    def expect(self, sums: dict[str, int]) -> None:
        """Set the checksums that the next push must have. Raises KeyError for a part without one."""
        self._wanted.copy_(checksum.expected_sums(self.offer.parts, sums))

    def zero_sums(self) -> Tensor:
        """Return the tensor for the next pull's sums [parts], set to 0."""
        self._sums.zero_()
        if self._sums.is_cuda:
            torch.cuda.current_stream().synchronize()  # other streams add to the sums
        return self._sums

    def compare(self) -> dict[str, float]:
        """Compare the sums with the expected ones. Returns named seconds. Raises WrongWeights."""
        began = time.perf_counter()
        wrong = checksum.wrong_parts(self._sums, self._wanted, self.offer.parts)
        if wrong:
            raise WrongWeights(
                f"{len(wrong)} of {len(self._sums)} tensors differ from the manifest's checksums, the first is "
                f"{wrong[0]}: the engine's weights are unknown, restart it"
            )
        return {"compared": time.perf_counter() - began}


def check(offer: Offer, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Check that the feeds together fill the engine's tensors, each element exactly once, from the memory that they
    offer. Raises CoverError.
    """
    pieces = ((r.tensor, r.at, r.count, r.width, r.pitch) for f in offer.feeds for unit in f.units for r in unit.runs)
    coverage.check("the engine's", names, [tensor.numel() for tensor in tensors], pieces)
    for feed in offer.feeds:
        _check_source(feed, offer)
    if odd := [n for n, t in zip(names, tensors, strict=True) if t.element_size() != offer.itemsize]:
        raise coverage.CoverError(f"{odd[0]} has elements of another size than the {offer.itemsize} bytes of the offer")


def _check_source(feed: Feed, offer: Offer) -> None:
    sizes = [segment.size for segment in feed.segments]
    for unit in feed.units:
        for run in unit.runs:
            if not 0 <= run.part < len(offer.parts):
                raise coverage.CoverError(
                    f"the offer has {len(offer.parts)} parts, and pid {feed.pid} gives part {run.part}"
                )
            known = 0 <= run.segment < len(sizes)
            if not known or run.byte < 0 or run.byte + run.count * offer.itemsize > sizes[run.segment]:
                raise coverage.CoverError(
                    f"{offer.parts[run.part]} lies outside of the memory that the trainer offers (pid {feed.pid})"
                )
