"""Joins the routes of one sequence from the turns that captured them.

Every token of a sequence but its last has routes, from the first turn that captured it. A turn's token has the same
position in its sequence, because the turn's prompt repeats the sequence from its start. The ids of each token and layer
ascend, so equal choices are equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artd_schema.data.findings import Finding
from artd_schema.data.route_rules import gap_finding, place_finding
from artd_schema.data.routes import BadRoutes, check_routes
from artd_schema.data.trajectory import RouteShape, Turn

Ids = NDArray[Any]
"""Expert ids, of dtype `id_type`."""

REMEDY = "sample it again through artd's gateway, or start a run with expert_replay=false"


class AssemblyError(ValueError):
    """A turn that ingest should have refused. `where` is its path in the body, such as `turns[1].logprobs`."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where
        self.what = what


def accept(found: Finding | None, path: str) -> None:
    """Check the turn at `path`: raise AssemblyError with the rule book's finding, if there is one."""
    if found:
        where, what = found.under(path)
        raise AssemblyError(where, what)


@dataclass(slots=True)
class Captured:
    """The routes of a sequence that grows turn by turn: the rows of its tokens 0 .. covered - 1."""

    shape: RouteShape
    covered: int = 0
    pieces: list[bytes] = field(default_factory=list)
    begins: list[tuple[int, str]] = field(default_factory=list)
    """The first token of each piece, and the path of its turn."""

    def add(self, turn: Turn, path: str) -> None:
        """Add the routes of a turn that no earlier turn captured. `path` is that of the turn. Raises AssemblyError."""
        found = (place_finding(turn, self.shape) if turn.routes else None) or gap_finding(turn, self.covered, REMEDY)
        accept(found, path)
        known, rows = self.covered - turn.routes_start, len(turn.routes) // self.shape.row_bytes
        if rows and rows > known:
            self.pieces.append(turn.routes[known * self.shape.row_bytes :])
            self.begins.append((self.covered, path))
            self.covered = turn.routes_start + rows

    def ids(self) -> Ids:
        """Return the checked ids [covered, layers, topk]; those of each token and layer ascend. Raises AssemblyError."""
        data = b"".join(self.pieces)
        try:
            rows = check_routes(data, self.shape)
        except BadRoutes as error:
            path = [path for first, path in self.begins if first <= error.row][-1]
            raise AssemblyError(f"{path}.routes[{error.row}]", f"{error}; {REMEDY}") from None
        return ascending(np.frombuffer(data, id_type(self.shape)).reshape(rows, self.shape.layers, self.shape.topk))


def ascending(ids: Ids) -> Ids:
    """Sort the ids of each token and layer in choices [..., topk]. Engines report them in any order, by weight or by
    id.

    Odd-even transposition of whole columns. np.sort sorts one choice after another and takes five times as long for top
    8.
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
    """Return the dtype of the shape's ids: uint8, or uint16 (little-endian)."""
    return np.dtype("<u2" if shape.width == 2 else "u1")
