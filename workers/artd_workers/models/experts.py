"""Splits fused expert tensors, so that all other code sees each expert's weights under a name of its own.

A checkpoint stores each expert apart (`mlp.experts.3.gate_proj.weight`), or all experts of a layer in one tensor
(`mlp.experts.gate_up_proj`, transformers 5). Slices are exact. This file imports torch only, because the engine's interpreter
imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

_STEM = ".mlp.experts"
FUSED: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Last part of a fused tensor's name [experts, parts x out, in] -> the weights [out, in] that it holds for each expert, in order."""


@dataclass(frozen=True)
class Slice:
    """One expert's weight inside a fused tensor: its index in the first dimension, its rows in the second."""

    expert: int
    rows: slice

    def of(self, fused: Tensor) -> Tensor:
        """Return the weight [out, in], contiguous. `fused` [experts, rows, in]: a tensor, or what safetensors' `get_slice`
        returns."""
        return fused[self.expert, self.rows].contiguous()

    def size(self, shape: Sequence[int]) -> int:
        """Return the number of elements. `shape`: that of the fused tensor."""
        return (self.rows.stop - self.rows.start) * shape[2]


def parts(name: str, shape: Iterable[int]) -> Iterator[tuple[str, Slice]]:
    """Yield (per-expert name, slice) of every weight in a fused tensor, nothing for another tensor.

    Raises ValueError for a fused name whose shape cannot be split.
    """
    stem, _, last = name.rpartition(".")
    if not stem.endswith(_STEM) or last not in FUSED:
        return
    size, names = tuple(shape), FUSED[last]
    if len(size) != 3 or size[1] % len(names):
        raise ValueError(f"{name} has the shape {size}: fused experts are [experts, {len(names)} x out, in]")
    rows = size[1] // len(names)
    for expert in range(size[0]):
        for number, part in enumerate(names):
            yield f"{stem}.{expert}.{part}.weight", Slice(expert, slice(number * rows, (number + 1) * rows))
