"""Routed experts of one sequence, put together from the turns that captured them.

Owner of: no state. Invariants: strict: every token of a sequence but its last has routes, from one turn: the first that
captured it; a token of a turn has the same position in its sequence, because the turn's prompt repeats the sequence from
its start; equal choices are equal bytes, because the ids of each token and layer ascend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artd_schema.routes import BadRoutes, check_routes
from artd_schema.trajectory import RouteShape, Turn

Ids = NDArray[Any]
"""Expert ids, of dtype `id_type`."""

REMEDY = "sample it again through artd's gateway, or start a run with expert_replay=false"


class AssemblyError(ValueError):
    """A turn that ingest should have refused. `where` is its path in the body, such as `turns[1].logprobs`."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where
        self.what = what


@dataclass(slots=True)
class Captured:
    """The routes of a sequence that grows turn by turn: rows of its tokens 0 .. covered - 1."""

    shape: RouteShape
    covered: int = 0
    pieces: list[bytes] = field(default_factory=list)
    begins: list[tuple[int, int]] = field(default_factory=list)
    """(first token, turn) of each piece."""

    def add(self, number: int, turn: Turn, tokens: int) -> None:
        """Take from turn `number` what no earlier one captured. tokens: of its prompt and sampled ones. Raises
        AssemblyError."""
        rows = _aligned(number, turn, tokens, self.shape)
        if self.covered < tokens - 1 and (not rows or turn.routes_start > self.covered):
            begin = f"its turn's rows begin at token {turn.routes_start}" if rows else "its turn has none"
            raise AssemblyError(name(number, self.covered), f"no routes for this token: {begin}; {REMEDY}")
        known = self.covered - turn.routes_start
        if rows and rows > known:
            self.pieces.append(turn.routes[known * self.shape.row_bytes :])
            self.begins.append((self.covered, number))
            self.covered = turn.routes_start + rows

    def ids(self) -> Ids:
        """[covered, layers, topk], checked; those of a token and layer ascend. Raises AssemblyError."""
        data = b"".join(self.pieces)
        try:
            rows = check_routes(data, self.shape)
        except BadRoutes as error:
            turn = max(turn for first, turn in self.begins if first <= error.row)
            raise AssemblyError(name(turn, error.row), f"{error}; {REMEDY}") from None
        return ascending(np.frombuffer(data, id_type(self.shape)).reshape(rows, self.shape.layers, self.shape.topk))


def ascending(ids: Ids) -> Ids:
    """The same choices [..., topk], the ids of each sorted: engines tell them in any order, by weight or by id.

    Odd-even transposition by whole columns: np.sort sorts one choice after another, which takes five times as long for
    top 8.
    """
    columns = [np.ascontiguousarray(ids[..., k]) for k in range(ids.shape[-1])]
    for turn in range(len(columns)):
        for k in range(turn % 2, len(columns) - 1, 2):
            one, other = columns[k : k + 2]
            columns[k : k + 2] = np.minimum(one, other), np.maximum(one, other)
    ordered = np.empty_like(ids)
    for k, column in enumerate(columns):
        ordered[..., k] = column
    return ordered


def id_type(shape: RouteShape) -> np.dtype[Any]:
    """uint8, or uint16 (little-endian)."""
    return np.dtype("<u2" if shape.width == 2 else "u1")


def name(turn: int, token: int) -> str:
    """Path of a token's routes; token counts from the start of the turn's prompt, wherever its rows begin."""
    return f"turns[{turn}].routes[{token}]"


def refuse(number: int, turn: Turn) -> None:
    """For a run that replays no experts. Raises AssemblyError."""
    if turn.routes:
        what = "routes, but the run replays no experts (a dense model, or expert_replay=false): leave them out"
        raise AssemblyError(f"turns[{number}].routes", f"{len(turn.routes)} bytes of {what}")


def _aligned(number: int, turn: Turn, tokens: int, shape: RouteShape) -> int:
    """Rows of a turn, which must lie against its end. Raises AssemblyError."""
    where = f"turns[{number}].routes"
    rows, rest = divmod(len(turn.routes), shape.row_bytes)
    if rest:
        form = f"[{shape.layers} layers, top {shape.topk}] of {shape.width}-byte ids"
        raise AssemblyError(
            where, f"{len(turn.routes)} bytes are not a whole number of {shape.row_bytes}-byte rows, {form}"
        )
    end = turn.routes_start + rows
    if rows and (turn.routes_start < 0 or end not in (tokens - 1, tokens)):
        raise AssemblyError(
            where,
            f"{rows} rows from token {turn.routes_start} on end at {end}: the turn has {tokens} tokens, and its rows must "
            "reach to the last one or end one before it",
        )
    return rows
