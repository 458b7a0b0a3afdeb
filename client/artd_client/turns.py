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


def count_parts(advantages: Given, weights: Given) -> int:
    """Return how many turns are given for: 1 where one number, or nothing, is given for all of a rollout's turns."""
    return next(
        (len(given) for given in (advantages, weights) if given is not None and not isinstance(given, int | float)), 1
    )


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


# ---- routed experts: nested sequences, arrays or bytes. numpy is never imported: arrays give their numbers by the buffer protocol


def route_bytes(ids: Any, experts: int) -> bytes:
    """Return expert ids [rows][MoE layers][topk] as bytes: u8 for up to 256 experts, else little-endian u16.

    Bytes are returned unchanged. `experts`: routed experts of a layer, unused for bytes. Raises Invalid with the bad place.
    """
    if isinstance(ids, bytes | bytearray):
        return bytes(ids)
    if not 1 <= experts <= 65536:
        raise Invalid(f"experts: is {experts}, but the routes are no bytes: give the experts of a layer", "experts")
    code = "B" if experts <= 256 else "H"
    plain = _same_width(ids, code)
    return _pack_routes(ids.tolist() if hasattr(ids, "tolist") else ids, code, experts) if plain is None else plain


def _same_width(ids: Any, code: str) -> bytes | None:
    """Return the bytes of an array whose numbers already have the right width, else None."""
    try:
        view = memoryview(ids)
    except TypeError:
        return None
    return view.tobytes() if view.format == code and view.ndim == 3 and sys.byteorder == "little" else None


def _pack_routes(rows: Any, code: str, experts: int) -> bytes:
    column = array(code)
    form = None
    for number, row in enumerate(rows):
        try:
            form = form or (len(row), len(row[0]))
            for layer, chosen in enumerate(row):
                column.extend(_expert_ids(chosen, code, experts, f"routes[{number}][{layer}]", form[1]))
        except (TypeError, IndexError) as error:
            raise Invalid(f"routes[{number}]: is not [layers][topk] of expert ids", f"routes[{number}]") from error
        if len(row) != form[0]:
            raise Invalid(f"routes[{number}]: has {len(row)} layers, not {form[0]}", f"routes[{number}]")
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _expert_ids(chosen: Any, code: str, experts: int, where: str, topk: int) -> array[int]:
    if len(chosen) != topk:
        raise Invalid(f"{where}: has {len(chosen)} ids, not {topk}", where)
    try:
        ids = array(code, chosen)
    except (TypeError, OverflowError):
        raise Invalid(f"{where}: {chosen!r} are not ids of {experts} experts", where) from None
    if ids and max(ids) >= experts:
        raise Invalid(f"{where}: {chosen!r} are not ids of {experts} experts", where)
    return ids
