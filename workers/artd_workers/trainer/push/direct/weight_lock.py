"""A copy of the adapter for live pushes, and a lock that keeps training from changing weights while a push reads
them.

A job may begin before the reader of a push has ended, so a push is fed from a copy of the adapter. `WeightLock` owns
that copy (one flat fp32 buffer), the lock, and the version of the weights that are served. There is one reader at a
time, because readers share the ring's buffers too. `renew` returns only when no reader is left, and nothing that a
reader reads changes before that: `renew` first refuses new readers of older versions, then waits for the current
reader, and aborts it at the reader's deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from artd_workers.deadline import Deadline

ABORT_S = 30.0
"""Seconds that an aborted reader gets to end."""
_ALIGNED = 64
"""Each parameter's copy starts at a multiple of so many numbers, as kernels prefer."""

Adapter = dict[str, Tensor]
"""Tensors by PEFT name."""


class Stale(Exception):
    """Training has changed the weights that a push was to read."""


@dataclass(frozen=True)
class _Reader:
    deadline: Deadline
    abort: Callable[[], None]


class WeightLock:
    """The lock and the copy that it protects.

    `adapter` is the copy by PEFT name, as views of `flat`. `scale` is alpha / rank. Without an adapter nothing is
    copied: training changes the model's own weights, and pushes read those.
    """

    def __init__(
        self, live: Mapping[str, Tensor], outward: Callable[[Mapping[str, Tensor]], Adapter] = dict, scale: float = 1.0,
        device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        """Copy the adapter. `live` has the trained fp32 masters by the trainer's name, and is empty without an adapter.
        `outward` maps tensors by the trainer's name to views of them by PEFT name."""
        self._live, self.scale = dict(live), scale
        self.flat, self._own = _copies(self._live, device)
        self.adapter = outward(self._own) if live else {}
        self.version = 0
        self._reader: _Reader | None = None
        self._changed = threading.Condition()

    @contextmanager
    def read(self, version: int, deadline: Deadline, abort: Callable[[], None]) -> Iterator[None]:
        """Hold the weights of `version` during the block. `abort` is as in `Snapshot.hold`. Raises Stale,
        TimeoutError.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._reader is None or self.version != version, deadline.left):
                raise TimeoutError("another push was fed from these weights until the deadline")
            if self.version != version:
                raise Stale("the trainer has trained these weights further")
            self._reader = _Reader(deadline, abort)
        try:
            yield
        finally:
            with self._changed:
                self._reader = None
                self._changed.notify_all()

    def renew(self, version: int | None = None) -> int:
        """Lock out the readers of the current version, and return the next version, or `version` if it is given.

        Returns when no reader is left: the caller may now change what is served, and then publish the version. Raises
        TimeoutError for a reader that ends neither at its deadline nor after its abort.
        """
        with self._changed:
            self.version = self.version + 1 if version is None else version
            self._changed.notify_all()
            reader = self._reader
            ended = reader is None or self._changed.wait_for(lambda: self._reader is None, reader.deadline.left)
            version = self.version
        if reader is not None and not ended:
            reader.abort()
            with self._changed:
                if not self._changed.wait_for(lambda: self._reader is None, ABORT_S):
                    raise TimeoutError(f"a push still reads the trainer's weights {ABORT_S:g} s after it was aborted")
        return version

    @torch.no_grad()
    def copy_adapter(self) -> None:
        """Copy the adapter as it is now. Call this between `renew` and the first read of the new version."""
        if self._own:
            torch._foreach_copy_(list(self._own.values()), list(self._live.values()))


def _copies(live: Mapping[str, Tensor], device: str | torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a flat fp32 buffer and its parts by name, with the parameters' shapes."""
    begins, end = [], 0
    for tensor in live.values():
        begins.append(end)
        end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
    flat = torch.zeros(end, device=device)
    return flat, {
        name: flat[at : at + tensor.numel()].view(tensor.shape)
        for at, (name, tensor) in zip(begins, live.items(), strict=True)
    }
