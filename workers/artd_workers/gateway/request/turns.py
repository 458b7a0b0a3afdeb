"""From an engine's token-level reply to `Turn`: columns as little-endian bytes, effective sampling, policy epochs.

Owner of no state. Invariant: a Turn is made only from numbers that agree with each other (one logprob per token, of
that token, finite; version spans that cover the tokens without gap or overlap); anything else is an EngineFailure,
never a guess.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from artd_schema.data.rules import columns_finding
from artd_schema.data.trajectory import Sampling, Turn, untrainable
from artd_workers.gateway.dialect import Dialect, Span
from artd_workers.gateway.engine.capture import Capture
from artd_workers.gateway.errors import ApiError, EngineFailure, invalid

Epochs = tuple[tuple[int, int], ...]
_ROUNDING = 1e-5

DEFAULTED = " (the engine's own default)"


def refuse_untrainable(dialect: Dialect, params: dict[str, Any], sampling: Sampling, body: dict[str, Any]) -> None:
    """params: as rendered; sampling: the effective ones; body: the client's, which may have left one to the engine. Errors: ApiError 400
    for samples that would be refused when they are submitted, or of which the ledger could not tell how they came about.
    Greedy ones are let through: that is how programs evaluate that cannot send a header."""
    if used := [name for name in dialect.reshaping if params.get(name)]:
        what = f"{', '.join(used)} changes the sampling distribution in a way that training cannot score; leave it out"
        raise _untrainable(what, used[0])
    if sampling.temperature > 0 and (bad := untrainable(sampling)):
        given = ", ".join(f"{one.name}={one.value}{'' if body.get(one.name) is not None else DEFAULTED}" for one in bad)
        what = f"{given} cannot be trained on: {bad[0].why}; send {', '.join(one.wanted for one in bad)}"
        raise _untrainable(what, bad[0].name)


def _untrainable(what: str, param: str) -> ApiError:
    message = f"{what}, or send the header `x-artd-split: eval` for a response that is never trained on"
    return invalid(message, param=param, code="untrainable_sampling")


def int_column(values: Sequence[int]) -> bytes:
    """int32 little-endian."""
    return _little(array("i", values))


def float_column(values: Sequence[float]) -> bytes:
    """float32 little-endian."""
    return _little(array("f", values))


def logprobs_of(engine: str, dialect: Dialect, choice: dict[str, Any]) -> list[float]:
    """Logprobs of the sampled tokens, one each, natural log. Errors: EngineFailure when they do not fit the tokens."""
    tokens = choice["token_ids"]
    scored = dialect.logprobs(choice)
    if [token for token, _ in scored] != tokens:
        raise _unusable(engine, f"{len(scored)} logprobs that do not belong to its {len(tokens)} sampled tokens")
    values = [value for _, value in scored]
    for position, value in enumerate(values):
        if value <= dialect.floor or value > _ROUNDING:
            raise _unusable(engine, f"logprob {value} at token {position}: not a finite log-probability")
    return [min(value, 0.0) for value in values]


def spans_of(engine: str, dialect: Dialect, choice: dict[str, Any]) -> list[Span]:
    """The weight-version spans of a choice, in order, covering its tokens exactly. Empty when the engine gives none."""
    spans, count = dialect.spans(choice), len(choice["token_ids"])
    edges = [0, *(span.end for span in spans)]
    if spans and ([span.start for span in spans] != edges[:-1] or edges[-1] != count):
        raise _unusable(engine, f"weight version spans {spans} for {count} tokens")
    return spans


def run_lengths(pairs: Sequence[tuple[int, int]]) -> Epochs:
    """(start, epoch) pairs with neighbours of equal epoch joined."""
    runs: list[tuple[int, int]] = []
    for start, epoch in pairs:
        if not runs or runs[-1][1] != epoch:
            runs.append((start, epoch))
    return tuple(runs)


def build_turn(
    engine: str,
    dialect: Dialect,
    prompt: Sequence[int],
    choice: dict[str, Any],
    *,
    sampling: Sampling,
    epochs: Epochs,
    cache: Epochs,
    capture: Capture | None,
    response_id: str,
    index: int,
    raw: dict[str, Any],
) -> Turn:
    """One choice of a generate reply as a Turn, by the rule book. Raises EngineFailure."""
    turn = Turn(
        prompt_ids=int_column(prompt),
        token_ids=int_column(choice["token_ids"]),
        logprobs=float_column(logprobs_of(engine, dialect, choice)),
        sampling=sampling,
        policy_epoch=epochs,
        kv_cache_epoch=cache,
        routes=capture.routes if capture else b"",
        routes_start=capture.start if capture else 0,
        finish_reason=choice.get("finish_reason") or "",
        response_id=response_id,
        choice=index,
        raw=msgspec.json.encode(raw),
    )
    if found := columns_finding(turn):
        raise _unusable(engine, f"{found.where}: {found.what}")
    return turn


def _little(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _unusable(engine: str, what: str) -> EngineFailure:
    return EngineFailure(engine, f"generate answered with {what}", retriable=False)
