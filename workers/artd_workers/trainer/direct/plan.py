"""The plan of a direct push: which elements of which Megatron tensor fill which of the engine's.

Purpose: `make_plan` puts an engine's table and a model's codec together; `units` says in which order and through which
buffers that is copied. Owner of: no state; no torch. Invariants: a plan that does not cover every tensor of both sides
exactly once, or not in whole 64-bit words, is refused by name: the push then goes by the engine's own transfer calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from artd_schema.direct import EngineTable, Piece, Plan

from ...engines.direct import cover
from .layout import Interval, in_engine, in_megatron

if TYPE_CHECKING:
    from ...models.codec import Codec

WORD = 8


class PlanError(ValueError):
    """No plan for this engine: what stands against it, and where."""


def make_plan(table: EngineTable, codec: Codec, shapes: Mapping[str, Sequence[int]], itemsize: int) -> Plan:
    """shapes: of every Megatron tensor, by the codec's names; itemsize: bytes of a served element. Raises PlanError,
    CoverError."""
    if table.obstacles:
        first = table.obstacles[0]
        raise PlanError(f"{first.where}: {first.why}")
    held = {row.megatron: list(in_megatron(row, codec.shape, shapes[row.megatron])) for row in codec.rows}
    sizes: dict[str, int] = {}
    for intervals in held.values():
        for one in intervals:
            sizes[one.part] = sizes.get(one.part, 0) + one.count
    parts, sources = {name: i for i, name in enumerate(sizes)}, {name: i for i, name in enumerate(held)}
    where = _Where(held, sources)
    pieces = [
        Piece(number, one.at + skip, parts[one.part], one.first + skip, one.first + skip, source, begin, count)
        for number, tensor in enumerate(table.tensors)
        for one in in_engine(tensor, sizes)
        for source, begin, skip, count in where.find(one)
    ]
    plan = Plan(parts=tuple(parts), sources=tuple(sources), pieces=tuple(pieces))
    _check(plan, table, sizes, {name: prod(shapes[name]) for name in sources}, itemsize)
    return plan


def _check(plan: Plan, table: EngineTable, sizes: Mapping[str, int], held: Mapping[str, int], itemsize: int) -> None:
    pieces = plan.pieces
    names = [tensor.name for tensor in table.tensors]
    cover.check(
        "the engine's", names, [prod(t.shape) for t in table.tensors], ((p.tensor, p.at, p.count) for p in pieces)
    )
    cover.check("the model's", plan.parts, list(sizes.values()), ((p.part, p.first, p.count) for p in pieces))
    cover.check("the trainer's", plan.sources, list(held.values()), ((p.source, p.begin, p.count) for p in pieces))
    for p in pieces:
        if any(number * itemsize % WORD for number in (p.at, p.first, p.begin, p.count)):
            raise PlanError(
                f"{names[p.tensor]}: {plan.parts[p.part]} does not lie there in whole words of {WORD} bytes"
            )
    if odd := [t for t in table.tensors if t.dtype != table.tensors[0].dtype]:
        raise PlanError(
            f"{odd[0].name} is {odd[0].dtype}, and {names[0]} is {table.tensors[0].dtype}: one dtype is needed"
        )


class _Where:
    """Finds the elements of a part in the trainer's tensors."""

    def __init__(self, held: Mapping[str, Sequence[Interval]], sources: Mapping[str, int]) -> None:
        self._of: dict[str, list[tuple[int, int, int, int]]] = {}
        for name, intervals in held.items():
            for one in intervals:
                self._of.setdefault(one.part, []).append((one.first, sources[name], one.at, one.count))
        for found in self._of.values():
            found.sort()

    def find(self, wanted: Interval) -> list[tuple[int, int, int, int]]:
        """(source, begin there, skip, count) of each run that holds elements of `wanted`, `skip` behind its begin."""
        intervals = self._of[wanted.part]
        return [
            (intervals[i][1], intervals[i][2] + low - intervals[i][0], low - wanted.first, high - low)
            for i, low, high in overlaps(wanted.first, wanted.count, [(x[0], x[3]) for x in intervals])
        ]


def overlaps(first: int, count: int, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(index, low, high) of each of the sorted runs (first, count) that has elements in first .. first + count - 1."""
    out, i = [], max(bisect_right(runs, (first, 1 << 62)) - 1, 0)
    while i < len(runs) and runs[i][0] < first + count:
        low, high = max(first, runs[i][0]), min(first + count, runs[i][0] + runs[i][1])
        if low < high:
            out.append((i, low, high))
        i += 1
    return out
