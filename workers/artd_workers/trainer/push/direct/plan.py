"""The plan of a direct push: which elements of which Megatron tensors fill which tensors of the engine.

`make_plan` combines an engine's table with a model's codec, or with one process's part of it. It needs no torch. It
refuses, with the tensor's name, a plan that does not cover every tensor of both sides exactly once or not in whole
64-bit words. The push then goes another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from artd_schema.wire.direct import EngineTable, Piece, Plan, Run
from artd_workers.transfer import coverage

from .layout import WHOLE, Interval, Shard, Sharding, in_engine, in_megatron, whole_shapes

if TYPE_CHECKING:
    from artd_workers.models.codec import Codec

WORD = 8


class PlanError(ValueError):
    """There is no plan for this engine. The text says why, and where."""


def make_plan(
    table: EngineTable,
    codec: Codec,
    shapes: Mapping[str, Sequence[int]],
    itemsize: int,
    sharding: Sharding | None = None,
) -> Plan:
    """Return this process's plan for an engine.

    `shapes` has those of every Megatron tensor, by the codec's names. `itemsize` is the number of bytes of a served
    element. `sharding` is set if other processes give the rest of the model; the caller must then run `check_coverage`
    on the pieces of all processes. Raises PlanError, CoverError.
    """
    if table.obstacles:
        first = table.obstacles[0]
        raise PlanError(f"{first.where}: {first.why}")
    model = sharding or single_process(codec, shapes)
    parts = {name: i for i, name in enumerate(model.shapes)}
    sizes = {name: prod(shape) for name, shape in model.shapes.items()}
    where = _places(codec, shapes, model)
    pieces = [
        Piece(
            number, at + one.first, parts[part], one.first, one.own, source, one.at, one.count, one.width, one.pitch
        )
        for number, tensor in enumerate(table.tensors)
        for part, at in in_engine(tensor, sizes)
        for source, one in where.get(part, ())
    ]  # fmt: skip
    plan = Plan(parts=tuple(parts), sources=tuple(row.megatron for row in codec.rows), pieces=tuple(pieces))
    if sharding is None:
        check_coverage(table, plan.parts, list(sizes.values()), pieces)
    _check(plan, table, [prod(shapes[name]) for name in plan.sources], itemsize)
    return plan


def single_process(codec: Codec, shapes: Mapping[str, Sequence[int]]) -> Sharding:
    """Return the layout of a model that one process holds as a whole."""
    return Sharding({}, whole_tensors(codec, shapes, {}))


def whole_tensors(
    codec: Codec, shapes: Mapping[str, Sequence[int]], shards: Mapping[str, Shard]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each whole Hugging Face tensor of which this process holds a part."""
    return {
        part: shape
        for row in codec.rows
        for part, shape in whole_shapes(row, codec.shape, shapes[row.megatron], shards.get(row.megatron, WHOLE))
    }


def _places(
    codec: Codec, shapes: Mapping[str, Sequence[int]], model: Sharding
) -> dict[str, list[tuple[int, Interval]]]:
    """Return for each part the intervals that this process gives, each with the index of its source."""
    found: dict[str, list[tuple[int, Interval]]] = {}
    for source, row in enumerate(codec.rows):
        share = model.shards.get(row.megatron, WHOLE)
        for one in in_megatron(row, codec.shape, shapes[row.megatron], share):
            found.setdefault(one.part, []).append((source, one))
    return found


def check_coverage(
    table: EngineTable, parts: Sequence[str], sizes: Sequence[int], pieces: Sequence[Piece | Run]
) -> None:
    """Check that the pieces of all processes fill the engine's tensors and the model's tensors exactly once. sizes:
    elements of each part. Raises CoverError.
    """
    names, wanted = [tensor.name for tensor in table.tensors], [prod(tensor.shape) for tensor in table.tensors]
    coverage.check("the engine's", names, wanted, ((p.tensor, p.at, p.count, p.width, p.pitch) for p in pieces))
    coverage.check("the model's", parts, sizes, ((p.part, p.first, p.count, p.width, p.pitch) for p in pieces))


def _check(plan: Plan, table: EngineTable, held: Sequence[int], itemsize: int) -> None:
    names = [tensor.name for tensor in table.tensors]
    coverage.check("the trainer's", plan.sources, held, ((p.source, p.begin, p.count, 0, 0) for p in plan.pieces))
    for p in plan.pieces:
        if any(number * itemsize % WORD for number in (p.at, p.first, p.begin, p.count, p.width, p.pitch)):
            raise PlanError(
                f"{names[p.tensor]}: {plan.parts[p.part]} does not start and end there at multiples of {WORD} bytes"
            )
    if odd := [t for t in table.tensors if t.dtype != table.tensors[0].dtype]:
        raise PlanError(
            f"{odd[0].name} is {odd[0].dtype}, and {names[0]} is {table.tensors[0].dtype}: a direct push needs one dtype for all tensors"
        )
