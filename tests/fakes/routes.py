"""Routes as an engine would report them: arbitrary but valid, and distinguishable by token and salt. A token's ids in a layer
are distinct, and no run of tokens is all zero."""

from __future__ import annotations

import random

from artd_schema.data.trajectory import RouteShape

SHAPE = RouteShape(layers=3, topk=2, experts=8)
WIDE = RouteShape(layers=2, topk=4, experts=384)


def rows_of(shape: RouteShape, first: int, count: int, salt: int = 0) -> bytes:
    """Rows of tokens first .. first + count - 1, [count, layers, topk]."""
    return b"".join(_row(shape, first + j, salt) for j in range(count))


def layer_rows(shape: RouteShape, data: bytes) -> list[list[list[int]]]:
    """[rows][layers][topk] of bytes."""
    ids = [int.from_bytes(data[i : i + shape.width], "little") for i in range(0, len(data), shape.width)]
    layers = [ids[i : i + shape.topk] for i in range(0, len(ids), shape.topk)]
    return [layers[i : i + shape.layers] for i in range(0, len(layers), shape.layers)]


def put(shape: RouteShape, data: bytes, row: int, layer: int, k: int, expert: int) -> bytes:
    """The same routes but for one id."""
    at = row * shape.row_bytes + (layer * shape.topk + k) * shape.width
    return data[:at] + expert.to_bytes(shape.width, "little") + data[at + shape.width :]


def _row(shape: RouteShape, token: int, salt: int) -> bytes:
    rng = random.Random(token * 1_000_003 + salt)
    chosen = [rng.sample(range(shape.experts), shape.topk) for _ in range(shape.layers)]
    return b"".join(expert.to_bytes(shape.width, "little") for layer in chosen for expert in layer)
