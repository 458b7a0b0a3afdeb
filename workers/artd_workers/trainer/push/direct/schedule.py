"""In which order, and through which buffers, a plan is copied.

Purpose: what needs arithmetic (a merged adapter, another dtype) passes a ring of buffers, the rest is copied from where it
lies. Owner of: no state; no torch. Invariants: a buffer is laid out as the engine is, so that one copy fills a whole tensor
or as much of it as the buffer holds, however many experts that is; fragments are whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from artd_schema.direct import Piece, Plan


@dataclass(frozen=True)
class Fill:
    """A piece, or some rows of one, that is made in a buffer, `at` elements behind its begin."""

    piece: Piece
    at: int


@dataclass(frozen=True)
class Schedule:
    """in_place: pieces that are copied from the trainer's own tensors; slots: what is in the buffer at each slot."""

    in_place: tuple[Piece, ...]
    slots: tuple[tuple[Fill, ...], ...]


def make_schedule(plan: Plan, made: Mapping[int, int], buffer: int) -> Schedule:
    """made: index of each source that needs arithmetic -> elements in one of its rows; buffer: elements of a buffer.
    Raises ValueError when a row is larger than that."""
    in_place: list[Piece] = []
    slots: list[list[Fill]] = []
    used = buffer
    for piece in plan.pieces:
        if piece.source not in made:
            in_place.append(piece)
            continue
        width = made[piece.source]
        for rest in _fragments(piece, width, buffer - used, buffer):
            if used + rest.count > buffer:
                slots.append([])
                used = 0
            slots[-1].append(Fill(rest, used))
            used += rest.count
    return Schedule(tuple(in_place), tuple(map(tuple, slots)))


def _fragments(piece: Piece, width: int, free: int, buffer: int) -> Sequence[Piece]:
    """Cut a piece into whole rows: as much as is free in this buffer, then whole buffers."""
    if width > buffer:
        raise ValueError(f"a row of {width} elements does not fit into a buffer of {buffer}: make the buffers larger")
    out, skip, room = [], 0, free // width * width
    while skip < piece.count:
        count = min(room or buffer // width * width, piece.count - skip)
        far = skip // piece.width * piece.pitch if piece.width else skip
        out.append(msgspec.structs.replace(
            piece, at=piece.at + far, first=piece.first + far, own=piece.own + skip, begin=piece.begin + skip, count=count
        ))  # fmt: skip
        skip, room = skip + count, 0
    return out
