"""Fills the tensors of a replay bundle: the routes of every packed token, laid out like the rows.

Pure. All sequences that share a token have the same routes for it (`tree` shares no other token). A position without
routes (padding, the last token of a sequence) holds the ids 0 .. topk - 1 and is marked as not covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from artd_schema.data.trajectory import RouteShape

from .routes import id_type
from .rows import Placed, Segment
from .sequences import Ids, Sequence
from .tensors import Tensors


def fill_routes(
    shape: RouteShape, row_length: int, rows: Seq[Seq[Segment]], sequence_of: Mapping[Placed, Sequence]
) -> Tensors:
    """Return `routes` (uint8 or uint16 [layers, rows, row_length, topk]) and `covered` (uint8 [rows, row_length])."""
    kind = id_type(shape)
    routes = np.empty((shape.layers, len(rows), row_length, shape.topk), kind)
    covered = np.zeros((len(rows), row_length), np.uint8)
    for row, segments in enumerate(rows):
        at = 0
        for segment in segments:
            known = _routes(sequence_of[segment.owner])[segment.start : segment.end]
            there = slice(at, at + len(known))
            _choices(routes)[:, row, there] = _choices(known).T
            covered[row, there] = 1
            at += segment.end - segment.start
    routes[:, covered == 0] = np.arange(shape.topk, dtype=kind)
    return {"routes": routes, "covered": covered}


def _routes(sequence: Sequence) -> Ids:
    assert sequence.routes is not None, "a sequence was assembled without routes"
    return sequence.routes


def _choices(ids: Ids) -> np.ndarray:
    """Return the ids [..., topk] as one opaque item for each token and layer [...], which numpy copies as a whole."""
    return ids.view(np.dtype((np.void, ids.shape[-1] * ids.itemsize)))[..., 0]
