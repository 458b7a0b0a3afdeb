"""The rule book of a trajectory: what holds for every turn that gateway, ingest and packer accept.

Pure; standard library and msgspec only. A rule returns the first `Finding`, or None; each process raises its own error
from it. A trajectory that passes for training can be packed and trained: lengths agree, ids are in the vocabulary,
logprobs are finite and <= 0, the trainer can score the behaviour policy, and all routes are there if the run replays
experts (`route_rules`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .findings import Finding
from .route_rules import refused_routes, routes_finding
from .trajectory import RouteShape, Sampling, Turn, untrainable

MOST_EPOCH = (1 << 31) - 1
"""A packed batch stores epochs as int32."""
NO_PROMPT = "is empty: the first sampled token needs a token before it"


class Scan(NamedTuple):
    """How to scan the values of a column, which has at least one. `int_range` returns the smallest and the largest
    int32. `float_sum_and_largest` is for float32; if a value is not finite, the sum is not finite either."""

    int_range: Callable[[bytes], tuple[int, int]]
    float_sum_and_largest: Callable[[bytes], tuple[float, float]]


def int_range(column: bytes) -> tuple[int, int]:
    """Return the smallest and largest int32 value."""
    values = array("i", column)
    return min(values), max(values)


def float_sum_and_largest(column: bytes) -> tuple[float, float]:
    """Return the sum and the largest of float32 values."""
    values = array("f", column)
    return sum(values), max(values)


PLAIN = Scan(int_range, float_sum_and_largest)


# ---- one turn -------------------------------------------------------------------------------------------------------


def turn_finding(
    turn: Turn, trained: bool, vocab_size: int | None = None, next_epoch: int | None = None, scan: Scan = PLAIN
) -> Finding | None:
    """Return what is wrong with a turn, apart from its routes. The path begins at the turn. `vocab_size` and
    `next_epoch` are not checked if None."""
    count = len(turn.token_ids) // 4
    return (
        columns_finding(turn, vocab_size, scan)
        or _credit(turn.advantages, "advantages", count, scan)
        or _credit(turn.weights, "weights", count, scan, least=0.0)
        or (_spans(turn.policy_epoch, "policy_epoch", count, next_epoch) if turn.policy_epoch else None)
        or (
            _spans(turn.kv_cache_epoch, "kv_cache_epoch", count, next_epoch, falls=True)
            if turn.kv_cache_epoch
            else None
        )
        or (sampling_finding(turn.sampling) if trained else None)
    )


def columns_finding(turn: Turn, vocab_size: int | None = None, scan: Scan = PLAIN) -> Finding | None:
    """Return what is wrong with a turn's ids and logprobs."""
    return (
        _ids(turn.prompt_ids, "prompt_ids", vocab_size, scan)
        or _ids(turn.token_ids, "token_ids", vocab_size, scan)
        or (None if turn.prompt_ids else Finding("prompt_ids", NO_PROMPT))
        or _logprobs(turn.logprobs, len(turn.token_ids) // 4, scan)
    )


def _ids(column: bytes, field: str, vocab_size: int | None, scan: Scan) -> Finding | None:
    if len(column) % 4:
        return Finding(field, f"has {len(column)} bytes, not a whole number of int32")
    if not column or vocab_size is None:
        return None
    lowest, highest = scan.int_range(column)
    if lowest >= 0 and highest < vocab_size:
        return None
    ids = array("i", column)
    position = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
    return Finding(f"{field}[{position}]", f"token id {ids[position]} is outside the vocabulary of {vocab_size}")


def _logprobs(column: bytes, count: int, scan: Scan) -> Finding | None:
    if len(column) != 4 * count:
        return Finding("logprobs", f"has {len(column) // 4} values for {count} token ids")
    if not column:
        return None
    total, largest = scan.float_sum_and_largest(column)
    if largest <= 0 and math.isfinite(total):
        return None
    bad = ((at, value) for at, value in enumerate(array("f", column)) if not (math.isfinite(value) and value <= 0))
    position, value = next(bad, (-1, 0.0))
    if position < 0:
        return None  # the sum of finite numbers was too large
    return Finding(f"logprobs[{position}]", f"logprob {value} is not a finite number <= 0")


def _credit(column: bytes, field: str, count: int, scan: Scan, least: float = -math.inf) -> Finding | None:
    """Return what is wrong with a column that a program gives: it must be empty, or have a finite number for each
    token."""
    if not column:
        return None
    if len(column) != 4 * count:
        return Finding(field, f"has {len(column) // 4} values for {count} token ids")
    for position, value in enumerate(array("f", column)):
        if not (math.isfinite(value) and value >= least):
            return Finding(
                f"{field}[{position}]", f"{value} is not a finite number{' of at least 0' if least == 0 else ''}"
            )
    return None


def _spans(
    spans: tuple[tuple[int, int], ...], field: str, count: int, next_epoch: int | None, *, falls: bool = False
) -> Finding | None:
    """Return what is wrong with spans of epochs. With `falls` epochs may fall, as those of a cache do after a part that
    was computed again."""
    if what := _starts(spans, count) or _epochs(spans, next_epoch, falls=falls):
        return Finding(field, what)
    return None


def _starts(spans: tuple[tuple[int, int], ...], count: int) -> str:
    if spans[0][0] != 0:
        return "the first span must start at token 0"
    if any(later <= start for (start, _), (later, _) in zip(spans, spans[1:], strict=False)):
        return "spans must have rising starts"
    if spans[-1][0] >= max(count, 1):
        return f"a span starts at token {spans[-1][0]} of {count}"
    return ""


def _epochs(spans: tuple[tuple[int, int], ...], next_epoch: int | None, *, falls: bool) -> str:
    if not falls and any(newer < epoch for (_, epoch), (_, newer) in zip(spans, spans[1:], strict=False)):
        return "spans must have epochs that never fall"
    if next_epoch is None:
        odd = [epoch for _, epoch in spans if not 0 <= epoch <= MOST_EPOCH]
        return f"policy epoch {odd[0]} is not a number from 0 to {MOST_EPOCH}" if odd else ""
    unknown = [epoch for _, epoch in spans if not 0 <= epoch < next_epoch]
    return f"policy epoch {unknown[0]} was never served by this run" if unknown else ""


def sampling_finding(sampling: Sampling) -> Finding | None:
    """Return which sampling parameter the trainer cannot score, None if it can score them all."""
    for bad in untrainable(sampling):
        what = f"{bad.value}: {bad.why}; sample with {bad.wanted}, or use split='eval'"
        return Finding(f"sampling.{bad.name}", what)
    return None


# ---- a trajectory ---------------------------------------------------------------------------------------------------


def trajectory_finding(
    turns: Sequence[Turn],
    trained: bool,
    routes: RouteShape | None,
    vocab_size: int | None = None,
    next_epoch: int | None = None,
    scan: Scan = PLAIN,
) -> Finding | None:
    """Return what is wrong with a trajectory. `routes` is the shape of the run's routes, None if it replays no experts."""
    if not turns:
        return Finding("turns", "a trajectory needs at least one turn")
    for index, turn in enumerate(turns):
        found = refused_routes(turn) if turn.routes and routes is None else None
        found = found or turn_finding(turn, trained, vocab_size, next_epoch, scan)
        if found:
            return found.under(f"turns[{index}]")
    return routes_finding(turns, routes, trained) if routes is not None else None


def epoch_range(turns: Sequence[Turn]) -> tuple[int | None, int | None]:
    """Return the oldest and the newest policy epoch of the sampled tokens, or (None, None) if unknown."""
    epochs = [epoch for turn in turns for _, epoch in turn.policy_epoch]
    return (min(epochs), max(epochs)) if epochs else (None, None)
