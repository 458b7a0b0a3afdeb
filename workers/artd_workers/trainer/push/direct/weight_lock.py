"""The adapter as it was when a checkpoint was staged, and whose turn it is to read the trainer's weights.

Purpose: a job may begin before the reader of a push has ended, so a push is fed from a copy. Owner of: that copy, one flat fp32 buffer; the turn;
the version of what is served. Invariants: one reader at a time (readers share the ring's buffers too); nothing that a reader may
read is changed before `renew` has returned, which waits for the reader's end, aborts it at its deadline, and from its begin
on lets nobody read an older version.
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
"""Numbers: every parameter's copy begins at a multiple, as kernels like it."""

Adapter = dict[str, Tensor]
"""Tensors by PEFT name."""


class Stale(Exception):
    """The weights that were asked for have been trained further."""


@dataclass(frozen=True)
class _Reader:
    deadline: Deadline
    abort: Callable[[], None]


class WeightLock:
    """adapter: the copy by PEFT name, parts of `flat`; scale: alpha / rank. Without an adapter nothing is copied: the model's
    own weights are trained, and are read as they lie."""

    def __init__(
        self, live: Mapping[str, Tensor], outward: Callable[[Mapping[str, Tensor]], Adapter] = dict, scale: float = 1.0,
        device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        """live: the trained fp32 masters by own name, empty without an adapter; outward: tensors of their shapes by own name
        -> by PEFT name, as parts of the given ones."""
        self._live, self.scale = dict(live), scale
        self.flat, self._own = _copies(self._live, device)
        self.adapter = outward(self._own) if live else {}
        self.version = 0
        self._reader: _Reader | None = None
        self._changed = threading.Condition()

    @contextmanager
    def read(self, version: int, deadline: Deadline, abort: Callable[[], None]) -> Iterator[None]:
        """Inside, the weights are those of `version`. abort: as in `Snapshot.held`. Raises Stale, TimeoutError."""
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
        """Returns the next version, or the one that is given, when nobody reads any more: the caller changes what is served, then
        tells whom it wants. Raises TimeoutError for a reader that ends neither at its deadline nor when it is aborted."""
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
        """Copy the adapter as it is now; between `renew` and the first reader of its version."""
        if self._own:
            torch._foreach_copy_(list(self._own.values()), list(self._live.values()))


def _copies(live: Mapping[str, Tensor], device: str | torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """(flat fp32 buffer, its parts by name) of the parameters' shapes."""
    begins, end = [], 0
    for tensor in live.values():
        begins.append(end)
        end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
    flat = torch.zeros(end, device=device)
    return flat, {
        name: flat[at : at + tensor.numel()].view(tensor.shape)
        for at, (name, tensor) in zip(begins, live.items(), strict=True)
    }
