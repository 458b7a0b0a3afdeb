"""Says where a Hugging Face tensor is in Megatron's tensors and in an engine's, as intervals of elements; `plan.py` uses both
layouts.

They are exact permutations, as in `models.codec`. An engine tensor that names no parts is the tensor of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from artd_schema.wire.direct import EngineTensor

if TYPE_CHECKING:
    from artd_workers.models.codec import Heads, Row


@dataclass(frozen=True)
class Shard:
    """What a trainer process holds of a weight: shard `index` of `count` along `dim`, or all of it when `dim` is None.

    The parts of a fused weight are each sharded separately.
    """

    dim: int | None = None
    index: int = 0
    count: int = 1


WHOLE = Shard()


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded over the processes of which this one gives its part.

    `shards`: by Megatron name, WHOLE where a name is missing. `shapes`: of each whole Hugging Face tensor of the model, in the
    same order in all processes.
    """

    shards: Mapping[str, Shard]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Interval:
    """`count` adjacent elements of a part, which begin at `at` in a Megatron tensor; the other fields are those of `Piece`."""

    part: str
    first: int
    own: int
    at: int
    count: int
    width: int = 0
    pitch: int = 0


def in_engine(tensor: EngineTensor, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield (part, its first element) of each whole Hugging Face tensor in an engine's tensor. `sizes`: their elements.

    A part that `sizes` lacks is left out: the plan's check then names the gap.
    """
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


def in_megatron(row: Row, heads: Heads, shape: Sequence[int], shard: Shard = WHOLE) -> Iterator[Interval]:
    """Yield the parts of a codec row's tensor, in their order. `heads`, `shape`: of what this process holds of it."""
    size = prod(shape)
    if shard.dim == 1 and shard.count > 1:
        (part,), width = row.parts, shape[1]
        yield Interval(part, shard.index * width, 0, 0, size, width, shard.count * width)
        return
    sizes = _sizes(row, heads, shape)
    before = [shard.index * each if shard.dim == 0 else 0 for each in sizes]
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
    row: Row, heads: Heads, shape: Sequence[int], shard: Shard = WHOLE
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (part, shape of the whole part) of a codec row; arguments as for `in_megatron`."""
    for part, size in zip(row.parts, _sizes(row, heads, shape), strict=True):
        own = (size // shape[-1], shape[-1]) if len(shape) == 2 else (size,)
        yield part, tuple(n * shard.count if dim == shard.dim else n for dim, n in enumerate(own))


def _sizes(row: Row, heads: Heads, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the elements of each part in a codec row's tensor."""
    size = prod(shape)
    if row.layout != "query_groups":
        return (size // len(row.parts),) * len(row.parts)
    per_group = heads.heads // heads.groups
    return tuple(size // (per_group + 2) * lines for lines in (per_group, 1, 1))
