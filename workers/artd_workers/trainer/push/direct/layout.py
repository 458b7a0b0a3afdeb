"""Where a Hugging Face tensor lies in Megatron's tensors and in an engine's: intervals of elements.

Purpose: the two layouts that `plan.py` brings together. Owner of: no state. Invariants: exact permutations, as in
`models.codec`; an engine tensor that names no parts is the tensor of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from artd_schema.direct import EngineTensor

if TYPE_CHECKING:
    from artd_workers.models.codec import Heads, Row


@dataclass(frozen=True)
class Share:
    """How a trainer process holds a weight: part `index` of `count` along `dim`, the whole where that is None. Fused weights are
    split each by itself."""

    dim: int | None = None
    index: int = 0
    count: int = 1


WHOLE = Share()


@dataclass(frozen=True)
class Spread:
    """A model of which this process gives a part. shares: by Megatron name, WHOLE where it is missing; shapes: of each whole
    Hugging Face tensor of the model, in an order that all processes have in common."""

    shares: Mapping[str, Share]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Interval:
    """`count` elements of a part that lie together from `at` in a Megatron tensor; the rest as in `Piece`."""

    part: str
    first: int
    own: int
    at: int
    count: int
    width: int = 0
    pitch: int = 0


def in_engine(tensor: EngineTensor, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """(part, where it begins) of each whole Hugging Face tensor that fills an engine's, by its name. sizes: their elements. A
    part that `sizes` lacks is left out: the plan's check then names the gap."""
    at = 0
    for part in _parts(tensor):
        if part not in sizes:
            return
        yield part, at
        at += sizes[part]


def _parts(tensor: EngineTensor) -> Iterator[str]:
    parts = tensor.parts or (tensor.name,)
    for expert in range(tensor.shape[0] if "{e}" in parts[0] else 1):
        yield from (part.replace("{e}", str(expert)) for part in parts)


def in_megatron(row: Row, heads: Heads, shape: Sequence[int], share: Share = WHOLE) -> Iterator[Interval]:
    """The parts of a codec row's tensor, in the order in which they lie in it. heads, shape: of what this process has of it."""
    size = prod(shape)
    if share.dim == 1 and share.count > 1:
        (part,), width = row.parts, shape[1]
        yield Interval(part, share.index * width, 0, 0, size, width, share.count * width)
        return
    sizes = _sizes(row, heads, shape)
    before = [share.index * each if share.dim == 0 else 0 for each in sizes]
    if row.layout != "query_groups":
        at = 0
        for part, first, each in zip(row.parts, before, sizes, strict=True):
            yield Interval(part, first, 0, at, each)
            at += each
        return
    for group in range(heads.groups):
        at = group * (size // heads.groups)
        for part, first, each in zip(row.parts, before, sizes, strict=True):
            count = each // heads.groups
            yield Interval(part, first + group * count, group * count, at, count)
            at += count


def whole_shapes(
    row: Row, heads: Heads, shape: Sequence[int], share: Share = WHOLE
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(part, shape of the whole of it) of a codec row; arguments as of `in_megatron`."""
    for part, size in zip(row.parts, _sizes(row, heads, shape), strict=True):
        own = (size // shape[-1], shape[-1]) if len(shape) == 2 else (size,)
        yield part, tuple(n * share.count if dim == share.dim else n for dim, n in enumerate(own))


def _sizes(row: Row, heads: Heads, shape: Sequence[int]) -> tuple[int, ...]:
    """Elements of each part in a codec row's tensor."""
    size = prod(shape)
    if row.layout != "query_groups":
        return (size // len(row.parts),) * len(row.parts)
    per_group = heads.heads // heads.groups
    return tuple(size // (per_group + 2) * lines for lines in (per_group, 1, 1))
