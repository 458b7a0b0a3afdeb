"""The rules that a trajectory keeps before it is stored, each a clear error with the path of the bad field.

Owner of: nothing; pure. Invariants: whatever passes can be packed and trained: lengths agree, ids lie in the
vocabulary, logprobs are finite and <= 0, the behaviour policy is one that the trainer can score, and where experts are
replayed, their routes are there (`routes`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from artd.columns import float_sum_and_largest, int_range
from artd_schema.trajectory import RouteShape, Sampling, Turn, untrainable

from .fields import InvalidField
from .routes import check_turn_routes, refuse_routes

MOST_EPOCH = (1 << 31) - 1
"""A packed batch has an int32 for each token."""


def check_turns(
    turns: Sequence[Turn],
    vocab_size: int,
    trained: bool,
    next_epoch: int | None = None,
    routes: RouteShape | None = None,
) -> int:
    """Check a trajectory's turns and count its sampled tokens. next_epoch: epochs at or above it are unknown (None: not
    checked, for engines that artd does not run). routes: what the run's routes look like (None: it replays no experts).
    Errors: InvalidField."""
    if not turns:
        raise InvalidField("turns", "a trajectory needs at least one turn")
    sampled = 0
    for index, turn in enumerate(turns):
        if turn.routes and routes is None:
            raise refuse_routes(f"turns[{index}].routes")
        sampled += _check_turn(turn, f"turns[{index}]", vocab_size, trained, next_epoch)
    if routes is not None:
        check_turn_routes(turns, routes, trained)
    return sampled


def _check_turn(turn: Turn, path: str, vocab_size: int, trained: bool, next_epoch: int | None) -> int:
    _ids(turn.prompt_ids, f"{path}.prompt_ids", vocab_size)
    count = _ids(turn.token_ids, f"{path}.token_ids", vocab_size)
    if not turn.prompt_ids:
        raise InvalidField(f"{path}.prompt_ids", "is empty: the first sampled token needs a token before it")
    _logprobs(turn.logprobs, f"{path}.logprobs", count)
    _epochs(turn.policy_epoch, f"{path}.policy_epoch", count, next_epoch)
    _epochs(turn.kv_cache_epoch, f"{path}.kv_cache_epoch", count, next_epoch, falls=True)
    if trained:
        _check_sampling(turn.sampling, f"{path}.sampling")
    return count


def _ids(column: bytes, path: str, vocab_size: int) -> int:
    if len(column) % 4:
        raise InvalidField(path, f"has {len(column)} bytes, not a whole number of int32")
    if not column:
        return 0
    lowest, highest = int_range(column)
    if lowest < 0 or highest >= vocab_size:
        ids = array("i", column)
        position = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidField(f"{path}[{position}]", f"token id {ids[position]} is outside the vocabulary of {vocab_size}")
    return len(column) // 4


def _logprobs(column: bytes, path: str, count: int) -> None:
    if len(column) != 4 * count:
        raise InvalidField(path, f"has {len(column) // 4} values for {count} token ids")
    if not column:
        return
    total, largest = float_sum_and_largest(column)
    if largest <= 0 and math.isfinite(total):
        return
    for position, value in enumerate(array("f", column)):
        if not (math.isfinite(value) and value <= 0):
            raise InvalidField(f"{path}[{position}]", f"logprob {value} is not a finite number <= 0")


def _epochs(
    spans: tuple[tuple[int, int], ...], path: str, count: int, next_epoch: int | None, *, falls: bool = False
) -> None:
    """falls: epochs may fall, as those of a cache do behind a part that was computed again."""
    if not spans:
        return
    if spans[0][0] != 0:
        raise InvalidField(path, "the first span must start at token 0")
    for (start, epoch), (later, newer) in zip(spans, spans[1:], strict=False):
        if later <= start:
            raise InvalidField(path, "spans must have rising starts")
        if newer < epoch and not falls:
            raise InvalidField(path, "spans must have epochs that never fall")
    if spans[-1][0] >= max(count, 1):
        raise InvalidField(path, f"a span starts at token {spans[-1][0]} of {count}")
    if next_epoch is None:
        odd = [epoch for _, epoch in spans if not 0 <= epoch <= MOST_EPOCH]
        if odd:
            raise InvalidField(path, f"policy epoch {odd[0]} is not a number from 0 to {MOST_EPOCH}")
    else:
        unknown = [epoch for _, epoch in spans if not 0 <= epoch < next_epoch]
        if unknown:
            raise InvalidField(path, f"policy epoch {unknown[0]} was never served by this run")


def _check_sampling(sampling: Sampling, path: str) -> None:
    for bad in untrainable(sampling):
        raise InvalidField(
            f"{path}.{bad.name}", f"{bad.value}: {bad.why}; sample with {bad.wanted}, or use split='eval'"
        )


def epoch_range(turns: Sequence[Turn]) -> tuple[int | None, int | None]:
    """Oldest and newest policy epoch of the sampled tokens, or (None, None) when unknown."""
    epochs = [epoch for turn in turns for _, epoch in turn.policy_epoch]
    return (min(epochs), max(epochs)) if epochs else (None, None)
