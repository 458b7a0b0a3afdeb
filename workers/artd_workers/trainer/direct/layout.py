"""Where a Hugging Face tensor lies in Megatron's tensors and in an engine's: intervals of elements.

Purpose: the two layouts that `plan.py` brings together. Owner of: no state. Invariants: exact permutations, as in
`models.codec`; an engine tensor that no rule knows is taken to be the tensor of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from artd_schema.direct import EngineTensor

if TYPE_CHECKING:
    from ...models.codec import Heads, Row


@dataclass(frozen=True)
class Interval:
    """`count` elements of a Hugging Face tensor from `first`, which lie together from `at` in another tensor."""

    part: str
    first: int
    at: int
    count: int


# What vLLM fuses (0.25.1): its name -> what is on top of each other there, for each expert {e} where there are experts.
_FUSED: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), parts)
    for pattern, parts in (
        (r"(.*\.self_attn)\.qkv_proj\.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        (r"(.*\.mlp)\.gate_up_proj\.weight", ("gate_proj.weight", "up_proj.weight")),
        (r"(.*\.mlp\.experts)(?:\.routed_experts)?\.w13_weight", ("{e}.gate_proj.weight", "{e}.up_proj.weight")),
        (r"(.*\.mlp\.experts)(?:\.routed_experts)?\.w2_weight", ("{e}.down_proj.weight",)),
    )
)


def in_engine(tensor: EngineTensor, sizes: Mapping[str, int]) -> Iterator[Interval]:
    """What fills an engine's tensor, by its name. sizes: elements of each Hugging Face tensor. A part that `sizes` lacks is
    left out: the plan's check then names the gap."""
    at = 0
    for part in _parts(tensor):
        if part not in sizes:
            return
        yield Interval(part, 0, at, sizes[part])
        at += sizes[part]


def _parts(tensor: EngineTensor) -> Iterator[str]:
    for pattern, parts in _FUSED:
        if found := pattern.fullmatch(tensor.name):
            stem, experts = found[1], tensor.shape[0] if "{e}" in parts[0] else 1
            yield from (f"{stem}.{part.replace('{e}', str(e))}" for e in range(experts) for part in parts)
            return
    yield tensor.name


def in_megatron(row: Row, heads: Heads, shape: Sequence[int]) -> Iterator[Interval]:
    """The parts of a codec row's tensor, in the order in which they lie in it. shape: of that tensor."""
    size = prod(shape)
    if row.layout != "query_groups":
        each = size // len(row.parts)
        yield from (Interval(part, 0, i * each, each) for i, part in enumerate(row.parts))
        return
    lines = (heads.heads // heads.groups * heads.head_dim, heads.head_dim, heads.head_dim)
    width, at = size // shape[0], 0
    for group in range(heads.groups):
        for part, count in zip(row.parts, lines, strict=True):
            yield Interval(part, group * count * width, at, count * width)
            at += count * width
