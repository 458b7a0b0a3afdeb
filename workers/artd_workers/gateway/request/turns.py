"""Makes a `Turn` of an engine's token-level reply: columns as little-endian bytes, effective sampling, policy epochs.

A Turn is made only from numbers that agree with each other: one finite logprob for each token, of that token, and version spans that
cover the tokens without gap or overlap. Anything else is an EngineFailure, never a guess.
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
    """Refuse samples that `submit` would refuse, or of which the ledger could not tell how they came about.

    params: as rendered; sampling: the effective ones; body: the client's, which may have left one to the engine. Greedy samples pass:
    programs that cannot send a header evaluate with them. Raises ApiError 400."""
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
    """Return values as int32, little-endian."""
    return _little(array("i", values))


def float_column(values: Sequence[float]) -> bytes:
    """Return values as float32, little-endian."""
    return _little(array("f", values))


def read_ints(column: bytes) -> list[int]:
    """Return an int32 column as a list."""
    return _read("i", column)


def read_floats(column: bytes) -> list[float]:
    """Return a float32 column as a list."""
    return _read("f", column)


def logprobs_of(engine: str, dialect: Dialect, choice: dict[str, Any]) -> list[float]:
    """Return the logprob (natural) of each sampled token. Raises EngineFailure when they do not fit the tokens."""
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
    """Return the weight-version spans of a choice, in order, covering its tokens exactly; [] when the engine gives none."""
    spans, count = dialect.spans(choice), len(choice["token_ids"])
    edges = [0, *(span.end for span in spans)]
    if spans and ([span.start for span in spans] != edges[:-1] or edges[-1] != count):
        raise _unusable(engine, f"weight version spans {spans} for {count} tokens")
    return spans


def run_lengths(pairs: Sequence[tuple[int, int]]) -> Epochs:
    """Return (start, epoch) pairs with neighbours of equal epoch joined."""
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
    """Return one choice of a generate reply as a Turn. Raises EngineFailure."""
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


def _read(code: str, column: bytes) -> list[Any]:
    values = array(code, column)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _little(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _unusable(engine: str, what: str) -> EngineFailure:
    return EngineFailure(engine, f"generate answered with {what}", retriable=False)
