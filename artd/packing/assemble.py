"""Turns to sequences: what the policy read and sampled, token by token, never re-tokenised.

Owner of: no state. Invariants: every sampled token of a trajectory is trainable in exactly one sequence; a turn whose
prompt ids extend the current sequence exactly is appended, any other turn starts a new sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from artd_schema.trajectory import Sampling, Turn

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class AssemblyError(ValueError):
    """A turn that ingest should have refused. `where` is its path in the body, such as `turns[1].logprobs`."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where
        self.what = what


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One causal sequence; arrays of shape [n].

    tokens int32; mask uint8 (1 = sampled by the policy, trained); logprobs float32, natural log (NaN where not
    sampled); temperatures float32 (1 where not sampled); epochs int32, policy epoch (-1 where unknown or not sampled).
    """

    tokens: I32
    mask: U8
    logprobs: F32
    temperatures: F32
    epochs: I32

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def first_trainable(self) -> int:
        """Index of the first sampled token; the length of the sequence when there is none."""
        sampled = np.flatnonzero(self.mask)
        return int(sampled[0]) if len(sampled) else len(self)


def assemble(turns: Iterable[Turn]) -> list[Sequence]:
    """Sequences of one trajectory in order of their first turn. Raises AssemblyError."""
    sequences: list[Sequence] = []
    current = np.empty(0, np.int32)
    pieces: list[Sequence] = []
    for number, turn in enumerate(turns):
        where = f"turns[{number}]"
        _check_sampling(turn.sampling, f"{where}.sampling")
        prompt = column(turn.prompt_ids, np.int32, f"{where}.prompt_ids")
        known = len(current)
        if len(prompt) < known or not np.array_equal(prompt[:known], current):
            if pieces:
                sequences.append(_join(pieces))
            pieces, known = [], 0
        if len(prompt) == 0:
            raise AssemblyError(f"{where}.prompt_ids", "empty: nothing predicts the first sampled token")
        sampled = _sampled(turn, where)
        pieces.append(_context(prompt[known:]))
        pieces.append(sampled)
        current = np.concatenate((prompt, sampled.tokens))
    if pieces:
        sequences.append(_join(pieces))
    return sequences


def column(data: bytes, kind: type[np.generic], where: str) -> NDArray:
    """Little-endian bytes as a read-only array. Raises AssemblyError when the length is not a whole number of items."""
    dtype = np.dtype(kind).newbyteorder("<")
    if len(data) % dtype.itemsize:
        raise AssemblyError(where, f"{len(data)} bytes are not a whole number of {dtype.itemsize}-byte items")
    return np.frombuffer(data, dtype)


def _check_sampling(sampling: Sampling, where: str) -> None:
    """The trainer scores softmax(logits / temperature) over the whole vocabulary: nothing else may be sampled."""
    wanted = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    if not sampling.temperature > 0:
        raise AssemblyError(f"{where}.temperature", f"{sampling.temperature}: greedy tokens have no policy to train")
    for name, neutral in wanted.items():
        value = getattr(sampling, name)
        if value != neutral and not (name == "top_k" and value < 0):
            raise AssemblyError(f"{where}.{name}", f"{value} (not {neutral}): this distribution cannot be scored")


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


def _join(pieces: list[Sequence]) -> Sequence:
    return Sequence(
        np.concatenate([piece.tokens for piece in pieces]),
        np.concatenate([piece.mask for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.temperatures for piece in pieces]),
        np.concatenate([piece.epochs for piece in pieces]),
    )
