"""Checks routes as bytes: the rules for the ids of `Turn.routes`, which are the same wherever routes arrive.

The bytes of many tokens are handled as one long integer, with a lane of 8 bits for each token and layer, because what
imports this module (schema, the daemon's core, the gateway) has no numpy. 1,000 tokens x 48 layers x top 8 take about 2
ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from .trajectory import RouteShape

CHUNK = 1 << 18
"""The bytes that are checked at a time. They stay in the processor's cache."""

FEW = 64
"""A number of choices (one for each token and layer). With one expert for each token, up to this many choices may all
be expert 0."""


NOTHING = "the engine captured nothing"
"""What routes that are all zero mean."""


class BadRoutes(ValueError):
    """Routes that no router can have chosen. `row` is the first bad one, counted from the first of these routes."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(what)
        self.row = row


def check_routes(data: bytes, shape: RouteShape) -> int:
    """Check the ids [rows, layers, topk] of this shape in `data`. Returns the number of rows.

    Raises BadRoutes if the bytes are not whole rows, if all ids are zero (nothing was captured), if an id is not that
    of an expert, or if a token has the same id twice in a layer.
    """
    rows = count_rows(data, shape)
    if _nothing(data, shape):
        raise BadRoutes(0, f"every expert id of {rows} tokens is 0: {NOTHING}")
    step = max(CHUNK // shape.row_bytes, 1) * shape.row_bytes
    for at in range(0, len(data), step):
        part = data[at : at + step]
        if not _sound(part, shape):
            raise _fault(part, at // shape.row_bytes, shape)
    return rows


def count_rows(data: bytes, shape: RouteShape) -> int:
    """Return how many rows `data` has. Raises BadRoutes if the bytes are not whole rows."""
    rows, rest = divmod(len(data), shape.row_bytes)
    if rest:
        what = f"{len(data)} bytes are not a whole number of rows of {shape.row_bytes} bytes ({_form(shape)})"
        raise BadRoutes(rows, what)
    return rows


def _nothing(data: bytes, shape: RouteShape) -> bool:
    """Return whether all ids are zero although no router can have chosen so."""
    # With one expert for each token, zero means expert 0, which is a valid choice, and the only one of a single expert. A few tokens, such as what
    # ingest keeps of a short turn, may all go there; many tokens in all layers mean an empty buffer.
    if shape.topk == 1 and (shape.experts == 1 or len(data) <= FEW * shape.width):
        return False
    return len(data) > 0 and data.count(0) == len(data)


def _sound(part: bytes, shape: RouteShape) -> bool:
    """Return whether every id is that of an expert, and no token has the same id twice in a layer."""
    planes = [part] if shape.width == 1 else [part[0::2], part[1::2]]
    if not (_below(part, shape.experts) if shape.width == 1 else _wide_below(planes[0], planes[1], shape.experts)):
        return False
    lanes = len(planes[0]) // shape.topk
    columns = [[_number(plane[k :: shape.topk]) for plane in planes] for k in range(shape.topk)]
    low, top = _number(b"\x7f" * lanes), _number(b"\x80" * lanes)
    differ = top
    for k, column in enumerate(columns):
        for other in columns[:k]:
            change = 0
            for a, b in zip(column, other, strict=True):
                change |= a ^ b
            differ &= ((change & low) + low) | change  # the top bit of a lane stays where any bit of it differs
    return differ == top


def _below(ids: bytes, experts: int) -> bool:
    return experts > 255 or not ids.translate(None, bytes(range(experts)))


def _wide_below(low: bytes, high: bytes, experts: int) -> bool:
    """Return whether all u16 ids, given by their low and high bytes, are below `experts`."""
    edge, rest = divmod(experts, 256)
    if high.translate(None, bytes(range(min(edge + 1, 256)))):
        return False
    at_edge = _number(high.translate(bytes(value == edge for value in range(256))))
    over = _number(low.translate(bytes(value >= rest for value in range(256))))
    return not at_edge & over


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _fault(part: bytes, first_row: int, shape: RouteShape) -> BadRoutes:
    """Find the first bad row, one choice at a time."""
    width, group = shape.width, shape.topk * shape.width
    for at in range(0, len(part), group):
        chosen = part[at : at + group]
        ids = [int.from_bytes(chosen[i : i + width], "little") for i in range(0, group, width)]
        row, layer = divmod(at // group, shape.layers)
        outside = [number for number in ids if number >= shape.experts]
        if outside:
            return BadRoutes(first_row + row, id_outside(layer, outside[0], shape))
        if len(set(ids)) < len(ids):
            return BadRoutes(first_row + row, ids_equal(layer, ids))
    raise AssertionError("routes were found bad as a whole and good one by one")


def id_outside(layer: int, number: int, shape: RouteShape) -> str:
    """Return the text about an id that is no expert's, here and in the trainer."""
    return f"MoE layer {layer}: expert id {number}, but there are {shape.experts}"


def ids_equal(layer: int, ids: Sequence[int]) -> str:
    """Return the text about a token whose experts are not distinct."""
    return f"MoE layer {layer}: expert ids {list(ids)} are not distinct"


def _form(shape: RouteShape) -> str:
    return f"{shape.layers} MoE layers x top {shape.topk}, {'u8' if shape.width == 1 else 'u16'}"
