"""Assembles turns into sequences of what the policy read and sampled, token by token, never re-tokenised.

Every sampled token of a trajectory is trainable in exactly one sequence. A turn whose prompt ids extend the current
sequence exactly is appended; any other turn starts a new sequence. With expert replay, every token of a sequence but
its last has routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from artd.columns import SCAN
from artd_schema.data.route_rules import goes_on, refused_routes
from artd_schema.data.rules import turn_finding
from artd_schema.data.trajectory import RouteShape, Turn

from .routes import Captured, Ids, accept

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One causal sequence; arrays of shape [n].

    `tokens` is int32. `mask` is uint8: 1 where the policy sampled the token and it is trained. `logprobs` is float32,
    natural log, NaN where not sampled. `temperatures` is float32, 1 where not sampled. `epochs` is int32, the policy
    epoch, -1 where unknown or not sampled. `routes` holds expert ids [n, layers, topk], or [n - 1, layers, topk] if the
    last token has none because the engine never read it; None without expert replay. `given` and `weights` are float32,
    the program's advantages and factors, NaN and 1 where it gave none; None if it gave none at all.
    """

    tokens: I32
    mask: U8
    logprobs: F32
    temperatures: F32
    epochs: I32
    routes: Ids | None = None
    given: F32 | None = None
    weights: F32 | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def first_trainable(self) -> int:
        """The index of the first sampled token, or the sequence's length if there is none."""
        sampled = np.flatnonzero(self.mask)
        return int(sampled[0]) if len(sampled) else len(self)


@dataclass(slots=True)
class _Growing:
    """The sequence that the turns so far make: all of its tokens (int32), the pieces of its columns, and its routes."""

    captured: Captured | None
    tokens: bytes = b""
    pieces: list[Sequence] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.pieces.append(_context_part(_column(turn.prompt_ids[len(self.tokens) :], np.int32)))
        self.pieces.append(_sampled_part(turn))
        self.tokens = turn.prompt_ids + turn.token_ids

    def sequence(self) -> Sequence:
        return _join(self.pieces, _column(self.tokens, np.int32), self.captured.ids() if self.captured else None)


def assemble(turns: Iterable[Turn], shape: RouteShape | None = None) -> list[Sequence]:
    """Return the sequences of one trajectory, in the order of their first turn. Every turn must have routes of the
    shape `shape`; with None, none may have any. Raises AssemblyError."""
    finished: list[Sequence] = []
    growing = _growing(shape)
    for number, turn in enumerate(turns):
        path = f"turns[{number}]"
        accept(turn_finding(turn, trained=True, scan=SCAN) or (None if shape else refused_routes(turn)), path)
        if not goes_on(turn, growing.tokens):
            finished.append(growing.sequence())
            growing = _growing(shape)
        growing.add(turn)
        if growing.captured is not None:
            growing.captured.add(turn, path)
    if growing.pieces:
        finished.append(growing.sequence())
    return finished


def _growing(shape: RouteShape | None) -> _Growing:
    return _Growing(Captured(shape) if shape else None)


def _column(data: bytes, kind: type[np.generic]) -> NDArray:
    """Return little-endian bytes as a read-only array. Their length must be a multiple of the item size."""
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<"))


def _sampled_part(turn: Turn) -> Sequence:
    tokens = _column(turn.token_ids, np.int32)
    count = len(tokens)
    epochs = np.full(count, -1, np.int32)  # unknown
    for start, epoch in turn.policy_epoch:
        epochs[start:] = epoch
    weights = _column(turn.weights, np.float32) if turn.weights else None
    return Sequence(
        tokens,
        np.ones(count, np.uint8) if weights is None else (weights != 0).astype(np.uint8),
        _column(turn.logprobs, np.float32),
        np.full(count, turn.sampling.temperature, np.float32),
        epochs,
        given=_column(turn.advantages, np.float32) if turn.advantages else None,
        weights=weights,
    )


def _context_part(tokens: I32) -> Sequence:
    count = len(tokens)
    return Sequence(
        tokens,
        np.zeros(count, np.uint8),
        np.full(count, np.nan, np.float32),
        np.ones(count, np.float32),
        np.full(count, -1, np.int32),
    )


def _join(pieces: list[Sequence], tokens: I32, routes: Ids | None) -> Sequence:
    return Sequence(
        tokens,
        np.concatenate([piece.mask for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.temperatures for piece in pieces]),
        np.concatenate([piece.epochs for piece in pieces]),
        routes,
        given=_optional([piece.given for piece in pieces], pieces, np.nan),
        weights=_optional([piece.weights for piece in pieces], pieces, 1.0),
    )


def _optional(columns: list[F32 | None], pieces: list[Sequence], missing: float) -> F32 | None:
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [
            np.full(len(piece), missing, np.float32) if column is None else column
            for column, piece in zip(columns, pieces, strict=True)
        ]
    )
