"""Turns what an engine says of routed experts into the routes of a Turn, or into an EngineFailure that says what is wrong.

It reads two forms: the answer of artd's worker extension (MoE layers only, the layout of `Turn.routes`), and a field of the
engine's reply (all layers, zeros in dense ones). Rows start at a token of the prompt, reach the last sampled token or end one
before it, and hold ids that a router can choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artd_schema.data.route_rules import place_fault
from artd_schema.data.routes import BadRoutes, check_routes
from artd_schema.data.trajectory import RouteShape
from artd_workers.gateway.dialect import Dialect, Taken
from artd_workers.gateway.errors import EngineFailure

from . import npy

Json = dict[str, Any]


@dataclass(frozen=True)
class Capture:
    """Routes of one choice, laid out as in `Turn.routes`: row j belongs to token start + j of prompt + sampled tokens. A token
    whose cache was computed again has the row of the first time, by which the token after it was sampled: so both forms tell."""

    routes: bytes
    start: int


@dataclass(frozen=True)
class Choice:
    """A choice with the generate request that it answers. field: the experts that its reply has, as the engine wrote them, if any."""

    request: Json
    choice: Json
    field: Any

    @property
    def key(self) -> str:
        """Name under which the extension holds its routes."""
        return f"{self.request['request_id']}#{self.choice['index']}"


def captures_of(
    engine: str,
    dialect: Dialect,
    choices: Sequence[Choice],
    taken: Mapping[str, Taken],
    shape: RouteShape,
    needed: bool,
) -> list[Capture | None]:
    """Return the checked routes of each choice, None where there are none. Raises EngineFailure, also for routes that are missing
    and needed."""
    found: list[Capture | None] = []
    for choice in choices:
        try:
            capture = _capture(dialect, choice, taken.get(choice.key), shape)
        except ValueError as error:
            what = f"unusable routed experts for {choice.key}: {error}"
            raise EngineFailure(engine, what, retriable=False) from error
        if capture is None and needed:
            what = f"no routed experts for {choice.key}, and without them the response cannot be trained on"
            raise EngineFailure(engine, f"{what} (a run made with expert_replay=false needs none)", retriable=False)
        found.append(capture)
    return found


def _capture(dialect: Dialect, choice: Choice, taken: Taken | None, shape: RouteShape) -> Capture | None:
    """Return the checked routes of one choice, None where there are none. Raises ValueError."""
    if choice.field:
        capture = Capture(_moe_layers(dialect.read_field(choice.field), shape), dialect.field_start(choice.request))
    elif taken is not None:
        if len(taken.routes) != taken.rows * shape.row_bytes:
            raise ValueError(f"{len(taken.routes)} bytes for {taken.rows} rows of {shape.row_bytes} bytes")
        capture = Capture(taken.routes, taken.start)
        if dialect.ended_by_text(choice.choice):
            capture = _cut(capture, choice, shape)
    else:
        return None
    _check(capture, len(choice.request["token_ids"]), len(choice.choice["token_ids"]), shape)
    return capture


def _cut(capture: Capture, choice: Choice, shape: RouteShape) -> Capture:
    """Without rows after the last token: the API server finds a stop string in the text, and the engine went on meanwhile."""
    end = len(choice.request["token_ids"]) + len(choice.choice["token_ids"])
    return Capture(capture.routes[: max(end - capture.start, 0) * shape.row_bytes], capture.start)


def _check(capture: Capture, prompt: int, sampled: int, shape: RouteShape) -> None:
    try:
        rows = check_routes(capture.routes, shape)
    except BadRoutes as error:
        raise ValueError(f"token {capture.start + error.row}: {error}") from error
    if fault := place_fault(rows, capture.start, prompt + sampled):
        raise ValueError(fault)
    if capture.start >= prompt:
        raise ValueError(f"{rows} rows from token {capture.start}: they begin behind the prompt's {prompt} tokens")


def _moe_layers(ids: npy.Ids, shape: RouteShape) -> bytes:
    """Return the MoE layers of an array over all layers, in which dense ones are zero. Raises ValueError."""
    if (ids.topk, ids.width) != (shape.topk, shape.width):
        raise ValueError(f"top {ids.topk} of {ids.width} bytes, where the model has top {shape.topk} of {shape.width}")
    if ids.layers == shape.layers:
        return ids.data
    if ids.topk > 1 and not any(ids.data):
        raise ValueError("every expert id is 0: the engine captured nothing")
    kept = [layer for layer in range(ids.layers) if not _is_zero(ids, layer)]
    if ids.topk == 1 and len(kept) < shape.layers:  # zeros may be expert 0 as well: a layer is dense only if all fit
        raise ValueError(
            f"{ids.layers - len(kept)} of {ids.layers} layers are all zero, where {ids.layers - shape.layers} have no "
            "experts: with top 1 the others chose expert 0 or were not captured; ask through artd's worker extension"
        )
    if len(kept) != shape.layers:
        raise ValueError(
            f"{len(kept)} of {ids.layers} layers have routes, where the model has {shape.layers} MoE layers"
        )
    return _layers(ids, kept)


def _is_zero(ids: npy.Ids, layer: int) -> bool:
    size, row = ids.topk * ids.width, ids.layers * ids.topk * ids.width
    zero = bytes(size)
    return all(ids.data[at : at + size] == zero for at in range(layer * size, len(ids.data), row))


def _layers(ids: npy.Ids, kept: Sequence[int]) -> bytes:
    """Return the same rows with these layers only."""
    size, row = ids.topk * ids.width, ids.layers * ids.topk * ids.width
    edges: list[tuple[int, int]] = []
    for layer in kept:
        if edges and edges[-1][1] == layer * size:
            edges[-1] = (edges[-1][0], edges[-1][1] + size)
        else:
            edges.append((layer * size, (layer + 1) * size))
    return b"".join(ids.data[at + first : at + last] for at in range(0, len(ids.data), row) for first, last in edges)
