"""Computes the checksums of an adapter as an engine holds it: in the engine's dtype, with alpha / rank multiplied into B.

`weights.json` lists them, and the engine compares its own tensors where its kernels read the adapter. The arithmetic is the
engine's, which a test of the engine compares: a tensor is cast first, then B is multiplied in that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from artd_schema.data.manifest import WeightEntry
from artd_workers.models.codec import PEFT_B
from artd_workers.transfer.checksum import sums_of_stacked

_TOGETHER = 1 << 26
"""Elements that are summed at once: this takes a few buffers of 512 MiB."""


def entries(adapter: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> tuple[WeightEntry, ...]:
    """Return table entries of the adapter's tensors (PEFT names, fp32, any device), sorted by name. `scale`: alpha / rank;
    `dtype`: the engine's."""
    return tuple(sorted(_entries(adapter, scale, dtype), key=lambda entry: entry.name))


def convert(name: str, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Convert one tensor, or several of one kind [n, ...], to what an engine holds."""
    cast = tensor.detach().to(dtype)
    return (cast.float() * scale).to(dtype) if name.endswith(PEFT_B) else cast


def _entries(adapter: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> Iterator[WeightEntry]:
    def kind(name: str) -> tuple[bool, tuple[int, ...]]:
        return name.endswith(PEFT_B), tuple(adapter[name].shape)

    word = str(dtype).removeprefix("torch.")
    for (_, shape), names in groupby(sorted(adapter, key=kind), kind):
        for some in _batches(list(names), max(1, _TOGETHER // max(1, math.prod(shape)))):
            sums = sums_of_stacked(convert(some[0], torch.stack([adapter[name] for name in some]), scale, dtype))
            yield from (
                WeightEntry(name, word, shape, sum64=value) for name, value in zip(some, sums.tolist(), strict=True)
            )


def _batches(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))
