"""Turns to sequences: what the policy read and sampled, token by token, never re-tokenised.

Owner of: no state. Invariants: every sampled token of a trajectory is trainable in exactly one sequence; a turn whose
prompt ids extend the current sequence exactly is appended, any other turn starts a new sequence; with expert replay
every token of a sequence but its last has routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from artd_schema.trajectory import RouteShape, Sampling, Turn, untrainable

from .routes import AssemblyError, Captured, Ids, refuse

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One causal sequence; arrays of shape [n].

    tokens int32; mask uint8 (1 = sampled by the policy, trained); logprobs float32, natural log (NaN where not
    sampled); temperatures float32 (1 where not sampled); epochs int32, policy epoch (-1 where unknown or not sampled).
    routes: expert ids [n, layers, topk], or [n - 1, layers, topk] when the last token, which was never an input of the
    engine, has none; None without expert replay.
    """

    tokens: I32
    mask: U8
    logprobs: F32
    temperatures: F32
    epochs: I32
    routes: Ids | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def first_trainable(self) -> int:
        """Index of the first sampled token; the length of the sequence when there is none."""
        sampled = np.flatnonzero(self.mask)
        return int(sampled[0]) if len(sampled) else len(self)


@dataclass(slots=True)
class _Growing:
    """The sequence that the turns so far make. tokens: all of it; pieces: its columns; captured: its routes."""

    captured: Captured | None
    tokens: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    pieces: list[Sequence] = field(default_factory=list)

    def extended_by(self, prompt: I32) -> bool:
        known = len(self.tokens)
        return len(prompt) >= known and np.array_equal(prompt[:known], self.tokens)

    def add(self, prompt: I32, sampled: Sequence) -> None:
        self.pieces.append(_context(prompt[len(self.tokens) :]))
        self.pieces.append(sampled)
        self.tokens = np.concatenate((prompt, sampled.tokens))

    def sequence(self) -> Sequence:
        return _join(self.pieces, self.tokens, self.captured.ids() if self.captured else None)


def assemble(turns: Iterable[Turn], shape: RouteShape | None = None) -> list[Sequence]:
    """Sequences of one trajectory in order of their first turn. shape: of the routes that every turn must have; None:
    none may have any. Raises AssemblyError."""
    finished: list[Sequence] = []
    growing = _growing(shape)
    for number, turn in enumerate(turns):
        where = f"turns[{number}]"
        _check_sampling(turn.sampling, f"{where}.sampling")
        prompt = column(turn.prompt_ids, np.int32, f"{where}.prompt_ids")
        if len(prompt) == 0:
            raise AssemblyError(f"{where}.prompt_ids", "empty: nothing predicts the first sampled token")
        if not growing.extended_by(prompt):
            finished.append(growing.sequence())
            growing = _growing(shape)
        growing.add(prompt, _sampled(turn, where))
        if growing.captured is None:
            refuse(number, turn)
        else:
            growing.captured.add(number, turn, len(growing.tokens))
    if growing.pieces:
        finished.append(growing.sequence())
    return finished


def _growing(shape: RouteShape | None) -> _Growing:
    return _Growing(Captured(shape) if shape else None)


def column(data: bytes, kind: type[np.generic], where: str) -> NDArray:
    """Little-endian bytes as a read-only array. Raises AssemblyError when the length is not a whole number of items."""
    dtype = np.dtype(kind).newbyteorder("<")
    if len(data) % dtype.itemsize:
        raise AssemblyError(where, f"{len(data)} bytes are not a whole number of {dtype.itemsize}-byte items")
    return np.frombuffer(data, dtype)


def _check_sampling(sampling: Sampling, where: str) -> None:
    for bad in untrainable(sampling):
        raise AssemblyError(f"{where}.{bad.name}", f"{bad.value}: {bad.why}")


def _sampled(turn: Turn, where: str) -> Sequence:
    tokens = column(turn.token_ids, np.int32, f"{where}.token_ids")
    logprobs = column(turn.logprobs, np.float32, f"{where}.logprobs")
    count = len(tokens)
    if len(logprobs) != count:
        raise AssemblyError(f"{where}.logprobs", f"{len(logprobs)} logprobs for {count} token_ids")
    if not np.all((logprobs <= 0) & np.isfinite(logprobs)):
        bad = int(np.flatnonzero(~((logprobs <= 0) & np.isfinite(logprobs)))[0])
        raise AssemblyError(f"{where}.logprobs[{bad}]", f"{logprobs[bad]}: must be finite and <= 0")
    temperatures = np.full(count, turn.sampling.temperature, np.float32)
    epochs = _epochs(turn.policy_epoch, count, f"{where}.policy_epoch")
    return Sequence(tokens, np.ones(count, np.uint8), logprobs, temperatures, epochs)


def _epochs(runs: tuple[tuple[int, int], ...], count: int, where: str) -> I32:
    """Run lengths (start, epoch) spread over `count` tokens; -1 when there are none."""
    epochs = np.full(count, -1, np.int32)
    previous = -1
    for number, (start, epoch) in enumerate(runs):
        if (number == 0 and start != 0) or start <= previous or (start >= count and count > 0):
            raise AssemblyError(f"{where}[{number}]", f"start {start} of {count} tokens: starts rise from 0")
        epochs[start:] = epoch
        previous = start
    return epochs


def _context(tokens: I32) -> Sequence:
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
    )
