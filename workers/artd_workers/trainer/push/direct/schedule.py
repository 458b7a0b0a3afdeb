"""The order in which a plan is copied, and which pieces go through the ring of buffers.

Pieces that need arithmetic (a merged adapter, another dtype) go through the ring; all others are copied from the
weights themselves. This needs no torch. A buffer has the engine's layout, so that one copy fills a whole tensor, or
as much of it as the buffer holds, however many experts that is. A piece is only ever cut between rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from artd_schema.wire.direct import Piece, Plan


@dataclass(frozen=True)
class Fill:
    """A piece, or some rows of one, that is made in a buffer, `at` elements from its start."""

    piece: Piece
    at: int


@dataclass(frozen=True)
class Schedule:
    """The order of a plan's copies. `in_place` has the pieces that are copied from the trainer's own tensors. `slots`
    says what each slot contains."""

    in_place: tuple[Piece, ...]
    slots: tuple[tuple[Fill, ...], ...]


def make_schedule(plan: Plan, made: Mapping[int, int], buffer: int) -> Schedule:
    """Return the schedule of a plan.

    `made` maps the index of each source that needs arithmetic to the number of elements in one of its rows. `buffer` is
    the number of elements in a buffer. Raises ValueError if a row does not fit into a buffer.
    """
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
    """Cut a piece between rows: first as many rows as this buffer still has room for, then whole buffers."""
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
