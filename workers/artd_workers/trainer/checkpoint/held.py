"""An adapter as an engine has to hold it: its tensors in the engine's dtype, alpha / rank in B, each by its checksum.

Purpose: what `weights.json` lists for the engine to be compared with, where its kernels read the adapter. Owner of: no state.
Invariants: the arithmetic is the engine's (its own test compares them): a tensor is cast first, then B is multiplied in that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from artd_schema.manifest import WeightEntry
from artd_workers.models.codec import PEFT_B
from artd_workers.transfer.checksum import sums_of_stacked

_TOGETHER = 1 << 26
"""Elements that are summed at once: a few buffers of 512 MiB."""


def entries(adapter: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> tuple[WeightEntry, ...]:
    """Rows of the adapter's tensors (PEFT names, fp32, any device), sorted by name. scale: alpha / rank; dtype: the engine's."""
    return tuple(sorted(_entries(adapter, scale, dtype), key=lambda entry: entry.name))


def held(name: str, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """One tensor, or several of one kind [n, ...], as an engine holds it."""
    cast = tensor.detach().to(dtype)
    return (cast.float() * scale).to(dtype) if name.endswith(PEFT_B) else cast


def _entries(adapter: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> Iterator[WeightEntry]:
    def kind(name: str) -> tuple[bool, tuple[int, ...]]:
        return name.endswith(PEFT_B), tuple(adapter[name].shape)

    word = str(dtype).removeprefix("torch.")
    for (_, shape), names in groupby(sorted(adapter, key=kind), kind):
        for some in _batches(list(names), max(1, _TOGETHER // max(1, math.prod(shape)))):
            sums = sums_of_stacked(held(some[0], torch.stack([adapter[name] for name in some]), scale, dtype))
            yield from (
                WeightEntry(name, word, shape, sum64=value) for name, value in zip(some, sums.tolist(), strict=True)
            )


def _batches(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))
