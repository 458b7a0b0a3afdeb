"""Two ways to store experts, and the one that artd speaks.

Purpose: a checkpoint holds each expert's weights apart (`mlp.experts.3.gate_proj.weight`) or all of a layer's in one tensor
(`mlp.experts.gate_up_proj`, transformers 5); everything above a checkpoint's reader uses the first names.
Owner of: no state. Invariants: torch only (the engine's interpreter imports this); exact: slices, no arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

_STEM = ".mlp.experts"
FUSED: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Last word of a fused tensor [experts, parts x out, in] -> the weights [out, in] that it holds for each expert, in order."""


@dataclass(frozen=True)
class Slice:
    """One expert's weight inside a fused tensor: its index in the first dimension, its rows in the second."""

    expert: int
    rows: slice

    def of(self, fused: Tensor) -> Tensor:
        """fused [experts, rows, in] (a tensor or what safetensors' `get_slice` gives) -> [out, in], contiguous."""
        return fused[self.expert, self.rows].contiguous()

    def size(self, shape: Sequence[int]) -> int:
        """Elements of it. shape: of the fused tensor."""
        return (self.rows.stop - self.rows.start) * shape[2]


def parts(name: str, shape: Iterable[int]) -> Iterator[tuple[str, Slice]]:
    """(per-expert name, slice) of every weight in a fused tensor; nothing for a tensor that is not fused.

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
