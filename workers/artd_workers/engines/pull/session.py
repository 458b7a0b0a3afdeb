"""The engine's side of the direct push: pulls out of the open offer, in place or staged, behind the gate.

`Session` is what an engine's worker extension calls. It owns the open `OpenOffer`, the spare tensors, and the pull
into them that is under way. The gate finishes an update only when every checksum is the manifest's; otherwise the
update stays open, and the weights count as unknown. The engine's tensors keep their addresses, so that its CUDA
graphs stay valid. A new offer, `close`, or the end of any of the trainer's processes closes every mapping, which
would pin a dead process's memory. No mapping closes while a pull reads from it: every caller holds the lock, and a
pull ends by itself when a process has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from artd_schema.wire.direct import Offer
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import Gate
from artd_workers.transfer.contracts import Port, PullError

from .open_offer import OpenOffer, WrongWeights, check
from .staging import Spare, Staging

__all__ = ["MARGIN_BYTES", "OPEN_S", "Session", "WrongWeights"]

MARGIN_BYTES = 2 << 30
"""Spare memory leaves so many bytes of the device free."""
OPEN_S = 60.0
"""Default limit for opening an offer, in seconds."""


class Session:
    """The direct pushes of one engine worker. `names` and `tensors` are the engine's, in the order of its table."""

    def __init__(self, gate: Gate, port: Port, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._gate, self._port = gate, port
        self._names, self._tensors = tuple(names), tuple(tensors)
        self._link: OpenOffer | None = None
        self._spare_tensors: list[Tensor] = []
        self._spare: Spare | None = None
        self._staging: Staging | None = None
        self._lock = threading.RLock()

    # ---- the offer ----------------------------------------------------------------------------------------------------

    def open(self, offer: Offer, timeout_s: float = OPEN_S) -> dict[str, float]:
        """Open a trainer's offer, and close the one before it. Raises CoverError, DeviceError, PullError, OSError."""
        began = time.perf_counter()
        with self._lock:
            self.close()
            check(offer, self._names, self._tensors)
            self._link = OpenOffer(self._port, offer, self._tensors, self._on_end, Deadline(timeout_s))
            return {"seconds": time.perf_counter() - began, "segments": self._link.segments}

    def close(self) -> None:
        """Close every mapping of the trainer's memory. Waits for a pull that is under way. Any thread."""
        with self._lock:
            self._end_staging()
            link, self._link, self._spare = self._link, None, None
            if link is not None:
                link.close()

    def _on_end(self, link: OpenOffer) -> None:
        """Close an offer after one of its processes has ended. Runs in the watch's thread; a pull that is under way
        ends by itself."""
        with self._lock:
            if self._link is link:
                self.close()

    # ---- a push -------------------------------------------------------------------------------------------------------

    def expect(self, sums: dict[str, int]) -> None:
        """Set the checksums that the next push must have. Raises KeyError for a part without one."""
        with self._lock:
            self._open_offer().expect(sums)

    def room(self) -> bool:
        """Return whether the spare memory exists already or fits into the device."""
        return bool(self._spare_tensors) or self._port.free() >= _size(self._tensors) + MARGIN_BYTES

    def pull(self, fence: Fence, timeout_s: float) -> dict[str, float]:
        """Copy the trainer's weights into the engine's tensors and check them, while the engine is paused. Returns
        named seconds. Raises FenceError, PullError, WrongWeights.
        """
        with self._lock:
            link = self._open_offer()
            self._end_staging()
            self._gate.begin(fence, "direct")
            seconds = link.pull.run(fence.fence, Deadline(timeout_s), link.zero_sums())
            return seconds | self._finish(link)

    def stage(self, fence: Fence, timeout_s: float) -> dict[str, float]:
        """Start to copy into spare memory while the engine runs. Returns at once: the spare bytes that this takes.
        Raises FenceError, PullError.
        """
        with self._lock:
            link = self._open_offer()
            self._end_staging()
            self._gate.admit(fence)
            self._spare_tensors = self._spare_tensors or [torch.empty_like(tensor) for tensor in self._tensors]
            self._spare = self._spare or Spare(self._port, link, self._spare_tensors)
            run = self._spare.pull.run
            self._staging = Staging(fence, lambda: run(fence.fence, Deadline(timeout_s), None))
            return {"spare_bytes": _size(self._spare_tensors)}

    def poll_staging(self) -> dict[str, float]:
        """Return the staging pull's named seconds, empty while it runs. Raises the error with which it ended."""
        staging = self._staging
        if staging is None:
            raise PullError("nothing is staged: no pull was begun, or the trainer's process has ended")
        return staging.result()

    def swap(self, fence: Fence) -> dict[str, float]:
        """Copy what was staged for this fence into the engine's tensors and check them, while the engine is paused.
        Returns named seconds. Raises FenceError, PullError, WrongWeights.
        """
        with self._lock:
            spare = self._spare
            if spare is None or self._staging is None or self._staging.fence != fence or not self._staging.result():
                raise PullError(f"nothing is staged for push {fence.push} fence {fence.fence}")
            link = self._open_offer()
            self._gate.begin(fence, "direct")
            began = time.perf_counter()
            spare.copy(link.zero_sums())
            self._staging = None
            return {"summed": time.perf_counter() - began} | self._finish(link)

    def check(self) -> dict[str, float]:
        """Sum the engine's tensors as they are now, and compare. Returns named seconds. Raises PullError,
        WrongWeights.
        """
        with self._lock:
            began, link = time.perf_counter(), self._open_offer()
            link.pull.sum(link.zero_sums())
            return {"summed": time.perf_counter() - began} | link.compare()

    def drop_spare(self) -> None:
        """Free the spare memory."""
        with self._lock:
            self._end_staging()
            self._spare, self._spare_tensors = None, []

    # ---- parts --------------------------------------------------------------------------------------------------------

    def _end_staging(self) -> None:
        """Wait for a pull into spare memory, and forget it: two pulls at once would both write the page."""
        if self._staging is not None:
            self._staging.join()
            self._staging = None

    def _open_offer(self) -> OpenOffer:
        if self._link is None:
            raise PullError("no trainer's offer is open")
        return self._link

    def _finish(self, link: OpenOffer) -> dict[str, float]:
        seconds = link.compare()
        self._gate.finish("direct")
        return seconds


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
