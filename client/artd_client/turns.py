"""Makes trajectories from what a rollout program has: responses, or plain lists of numbers.

Columns are little-endian int32 and float32, as in `artd_schema.data.trajectory.Turn`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from artd_schema.data.trajectory import Credit, ExchangeRef, Sampling, Turn

from .errors import Invalid
from .routes import route_bytes


def turn(
    prompt_ids: Iterable[int],
    token_ids: Iterable[int],
    logprobs: Iterable[float],
    *,
    temperature: float = 1.0,
    sampling: Sampling | None = None,
    policy_epoch: Sequence[tuple[int, int]] = (),
    finish_reason: str = "",
    response_id: str = "",
    choice: int = 0,
    raw: bytes = b"",
    routes: Any = b"",
    routes_start: int = 0,
    experts: int = 0,
) -> Turn:
    """Return one generation by value. `prompt_ids` is what the model read, `token_ids` what it sampled.

    `logprobs`: natural logarithms, one for each sampled token, after the temperature. `sampling`: in place of `temperature`,
    for further sampling parameters. `policy_epoch`: (start token, epoch) of each stretch of sampled tokens.

    `routes`, for a run with expert replay: the experts to which the engine routed each token, as ids [rows][MoE layers][topk]
    in nested sequences or an array, with `experts` = routed experts of a layer; or as bytes (u8 for up to 256 experts, else
    little-endian u16). Layers without experts are left out. Row j is token `routes_start` + j of prompt and sampled tokens. The
    rows reach the last token, or end one before it, because engines never read the last one. A later turn of a conversation may
    start where the rows of the earlier turns end. Raises Invalid with the bad field.
    """
    prompt = _column("i", prompt_ids, "prompt_ids", "a token id of 32 bits")
    tokens = _column("i", token_ids, "token_ids", "a token id of 32 bits")
    values = _column("f", logprobs, "logprobs", "a number")
    if len(tokens) != len(values):
        raise Invalid(f"logprobs: {len(values) // 4} values for {len(tokens) // 4} token_ids", "logprobs")
    return Turn(
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=values,
        sampling=Sampling(temperature=temperature) if sampling is None else sampling,
        policy_epoch=tuple((int(start), int(epoch)) for start, epoch in policy_epoch),
        finish_reason=finish_reason,
        response_id=response_id,
        choice=choice,
        raw=raw,
        routes=route_bytes(routes, experts),
        routes_start=routes_start,
    )


Given = float | Sequence[float | Sequence[float]] | None
"""One number for a trajectory; or for each turn one number, or one for each of its sampled tokens."""


def make_credits(advantages: Given, weights: Given, turns: int) -> tuple[Credit, ...]:
    """Return what is given for each of `turns` turns; () where nothing is. Raises Invalid."""
    if advantages is None and weights is None:
        return ()
    columns = zip(_by_turn("advantages", advantages, turns), _by_turn("weights", weights, turns), strict=True)
    return tuple(Credit(*pair) for pair in columns)


def _by_turn(field: str, given: Given, turns: int) -> list[tuple[float, ...]]:
    if given is None:
        return [()] * turns
    parts = [given] * turns if isinstance(given, int | float) else list(given)
    if len(parts) != turns:
        raise Invalid(
            f"{field}: {len(parts)} parts for {turns} turns: give one number, or one part for each turn", field
        )
    try:
        return [(float(part),) if isinstance(part, int | float) else tuple(map(float, part)) for part in parts]
    except (TypeError, ValueError) as error:
        raise Invalid(f"{field}: {error}", field) from None


def reference(response: Any) -> ExchangeRef:
    """Return a reference to one choice of a response that artd's gateway served.

    `response`: an ExchangeRef; an OpenAI completion with one choice; its id, for choice 0; or a pair of completion or id with
    the choice or its index. Raises Invalid.
    """
    if isinstance(response, ExchangeRef):
        return response
    if isinstance(response, tuple | list):
        if len(response) != 2:
            raise Invalid(
                f"responses: a pair of response and choice is wanted, not {len(response)} things", "responses"
            )
        whole, choice = response
        index = getattr(choice, "index", choice)
        if not isinstance(index, int) or isinstance(index, bool):
            raise Invalid(f"responses: {choice!r} is not a choice or its index", "responses")
        return ExchangeRef(_identifier(whole), index)
    choices = getattr(response, "choices", None)
    if choices is not None and len(choices) != 1:
        raise Invalid(
            f"responses: response {response.id} has {len(choices)} choices; say which: (response, choice)", "responses"
        )
    return ExchangeRef(_identifier(response), choices[0].index if choices else 0)


def _identifier(response: Any) -> str:
    found = response if isinstance(response, str) else getattr(response, "id", None)
    if not isinstance(found, str) or not found:
        raise Invalid(f"responses: {response!r} is neither a response with an id nor an id", "responses")
    return found


def _column(code: str, values: Iterable[Any], name: str, want: str) -> bytes:
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    try:
        column = array(code, items)
    except (TypeError, OverflowError) as error:
        bad = next((i for i, item in enumerate(items) if not _fits(code, item)), 0)
        raise Invalid(f"{name}[{bad}]: {items[bad]!r} is not {want}", f"{name}[{bad}]") from error
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _fits(code: str, item: Any) -> bool:
    try:
        array(code, [item])
    except (TypeError, OverflowError):
        return False
    return True
