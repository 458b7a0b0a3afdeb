"""From an engine's token-level reply to `Turn`: columns as little-endian bytes, effective sampling, policy epochs.

Owner of no state. Invariant: a Turn is made only from numbers that agree with each other (one logprob per token, of
that token, finite; version spans that cover the tokens without gap or overlap); anything else is an EngineFailure,
never a guess.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from artd_schema.rules import columns_finding
from artd_schema.trajectory import Sampling, Turn, untrainable
from artd_workers.gateway.engine.capture import Capture
from artd_workers.gateway.errors import ApiError, EngineFailure, invalid

Epochs = tuple[tuple[int, int], ...]
FLOOR = -9999.0
"""What vLLM writes in place of -inf and NaN."""
_ROUNDING = 1e-5

OMITTED = {"max_tokens": 16}
"""vLLM's render leaves out parameters at the default of its `SamplingParams`, and its generate takes an absent max_tokens
for "no limit": a client's 16 would become the rest of the context (seen with 0.32.0)."""

_RESHAPING = (
    "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "thinking_token_budget",
    "watermarking", "trace_decode_token_ids", "extra_args",
)  # fmt: skip
"""Sampling parameters that change the distribution and that `Sampling` has no field for."""
DEFAULTED = " (the engine's own default)"


@dataclass(frozen=True)
class Span:
    """Sampled tokens [start, end) came from the weights labelled `version`."""

    version: str
    start: int
    end: int


def effective_sampling(params: dict[str, Any]) -> Sampling:
    """The parameters that the engine samples with, from the rendered `sampling_params` (vLLM leaves defaults out). Errors:
    ApiError 400 for a value of another type."""
    given = {name: params[name] for name in Sampling.__struct_fields__ if params.get(name) is not None}
    stop = given.get("stop", ())
    try:
        found = msgspec.convert(given | {"stop": (stop,) if isinstance(stop, str) else stop}, Sampling)
    except msgspec.ValidationError as error:
        raise invalid(f"sampling parameters: {error}", code="invalid_sampling") from None
    return msgspec.structs.replace(found, top_k=max(found.top_k, 0))


def refuse_untrainable(params: dict[str, Any], sampling: Sampling, body: dict[str, Any]) -> None:
    """sampling: the effective parameters; body: the client's, which may have left one to the engine. Errors: ApiError 400
    for samples that would be refused when they are submitted, or of which the ledger could not tell how they came about.
    Greedy ones are let through: that is how programs evaluate that cannot send a header."""
    if used := [name for name in _RESHAPING if params.get(name)]:
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


def logprobs_of(engine: str, choice: dict[str, Any]) -> list[float]:
    """Logprobs of the sampled tokens, one each, natural log. Errors: EngineFailure when they do not fit the tokens."""
    tokens = choice["token_ids"]
    content = (choice.get("logprobs") or {}).get("content") or []
    if [token_of(entry) for entry in content] != tokens:
        raise _unusable(engine, f"{len(content)} logprobs that do not belong to its {len(tokens)} sampled tokens")
    values = [entry["logprob"] for entry in content]
    for position, value in enumerate(values):
        if value <= FLOOR or value > _ROUNDING:
            raise _unusable(engine, f"logprob {value} at token {position}: not a finite log-probability")
    return [min(value, 0.0) for value in values]


def token_of(entry: dict[str, Any]) -> int | None:
    """The token that a logprob belongs to. vLLM before 0.32 has it as text only, `token_id:17`."""
    if "token_id" in entry:
        return entry["token_id"]
    number = str(entry.get("token", "")).removeprefix("token_id:")
    return int(number) if number.isdecimal() else None


def spans_of(engine: str, choice: dict[str, Any]) -> list[Span]:
    """The weight-version spans of a choice, in order, covering its tokens exactly. Empty when the engine gives none."""
    told, count = choice.get("weight_versions") or [], len(choice["token_ids"])
    spans = [Span(span["version"], span["start"], span["end"]) for span in told if span["end"] > span["start"]]
    edges = [0, *(span.end for span in spans)]
    if spans and ([span.start for span in spans] != edges[:-1] or edges[-1] != count):
        raise _unusable(engine, f"weight version spans {told} for {count} tokens")
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
        logprobs=float_column(logprobs_of(engine, choice)),
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
