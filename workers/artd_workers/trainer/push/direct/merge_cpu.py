"""Filling a slot with rows of merged weights in the engine's dtype, in plain torch.

`PlainFiller` calls the one merge of `transfer.merge`, on any device. On a GPU, `merge_cuda.CudaFiller` makes the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from artd_workers.models.codec import peft_names
from artd_workers.transfer.merge import merge

from .schedule import Fill


class Filler(Protocol):
    """Fills the slots of a schedule."""

    def fill(self, slot: int, buffer: Tensor, queue: Any) -> None:
        """Queue the work that writes a slot's rows into `buffer` [elements]."""


class PlainFiller:
    """Fills slots with plain torch. `weights` are by source index. `adapter` is by PEFT name, empty for weights that
    are only rounded."""

    def __init__(
        self, slots: Sequence[Sequence[Fill]], weights: Sequence[Tensor], parts: Sequence[str],
        adapter: Mapping[str, Tensor], scale: float,
    ) -> None:  # fmt: skip
        self._slots, self._weights, self._parts = slots, weights, parts
        self._adapter, self._scale = adapter, scale

    @torch.no_grad()
    def fill(self, slot: int, buffer: Tensor, queue: Any) -> None:
        for one in self._slots[slot]:
            piece, width = one.piece, self._weights[one.piece.source].shape[-1]
            rows = self._weights[piece.source].reshape(-1)[piece.begin : piece.begin + piece.count].view(-1, width)
            name_a, name_b = peft_names(self._parts[piece.part])
            if name_a in self._adapter:
                first = piece.own // width
                b = self._adapter[name_b][first : first + len(rows)]
                rows = merge(rows, self._adapter[name_a], b, self._scale, buffer.dtype)
            buffer[one.at : one.at + piece.count].copy_(rows.reshape(-1))
