"""The reply to the client: what derender is given, and what is corrected in what it gives back. Owner of no state.

vLLM's derender decodes every sampled token, also the ones behind which its own chat endpoint cuts the text: the stop
string, the stop token and the EOS (which is text where the client asks for `skip_special_tokens: false`). The cut is made
here, on the text alone; the ledger keeps every sampled token.
"""

from __future__ import annotations

from typing import Any

from artd_schema.trajectory import RouteShape
from artd_workers.gateway.engine import npy
from artd_workers.gateway.engine.capture import Capture

from .kinds import Kind
from .turns import token_of

Json = dict[str, Any]


def for_derender(reply: Json, params: Json, response_id: str, *, logprobs: bool) -> Json:
    """A generate reply as derender shall see it: our id, no stop token, logprobs only if they were asked for."""
    choices = []
    for choice in reply["choices"]:
        tokens = choice["token_ids"]
        seen = tokens[:-1] if _ends_in_stop_token(choice, params) and len(tokens) > 1 else tokens
        choices.append(choice | {"token_ids": seen, "logprobs": choice.get("logprobs") if logprobs else None})
    return reply | {"request_id": response_id, "choices": choices}


def cut_text(text: str, choice: Json, params: Json) -> str:
    """Text of a choice without the stop string or stop token that ended it.

    Generation ends at the first match, so the first occurrence is the one, unless min_tokens made the engine pass some.
    """
    if params.get("include_stop_str_in_output") or choice.get("finish_reason") != "stop":
        return text
    stop = choice["stop_reason"] if "stop_reason" in choice else _found_stop(text, params)
    if isinstance(stop, str):
        at = text.rfind(stop) if params.get("min_tokens") else text.find(stop)
        return text if at < 0 else text[:at]
    if _ends_in_stop_token(choice, params) and len(choice["token_ids"]) == 1:
        return ""
    return text


def finish_choice(kind: Kind, shown: Json, choice: Json, params: Json, index: int) -> Json:
    """The choice that derender made from `choice`, corrected: text, index, finish reason."""
    text = kind.text(shown)
    if text:
        kind.set_text(shown, cut_text(text, choice, params))
    shown["index"] = index
    if kind.chat and shown["message"].get("tool_calls") and shown.get("finish_reason") == "stop":
        shown["finish_reason"] = "tool_calls"
    return shown


def raw_of(shown: Json, choice: Json, generated: Json, head: Json) -> Json:
    """The raw response of one choice for the ledger: what the client gets and what the engine said besides, without
    what the columns hold. `head`: the response without its choices."""
    told = {name: value for name, value in choice.items() if name not in _COLUMNS and value is not None}
    beside = {name: value for name, value in generated.items() if name not in _GENERATE_COLUMNS and value is not None}
    return head | {"choices": [shown | {"logprobs": None}], "engine": beside | {"choices": [told]}}


def add_ids(kind: Kind, shown: Json, request: Json, choice: Json, logprobs: list[float]) -> None:
    """Token-id information for a client that asked for it; generation_top_log_probs, where alternatives were asked for
    too: for each sampled token [[token id, logprob], ...], likeliest first, itself among them."""
    bearer = kind.bearer_of_ids(shown)
    bearer["prompt_token_ids"] = request["token_ids"]
    bearer["generation_token_ids"] = choice["token_ids"]
    bearer["generation_log_probs"] = logprobs
    if request["sampling_params"].get("logprobs"):
        bearer["generation_top_log_probs"] = [_alternatives(entry) for entry in choice["logprobs"]["content"]]


def add_experts(kind: Kind, shown: Json, capture: Capture, shape: RouteShape) -> None:
    """Routed experts for a client that asked for token ids: base64 (msgspec's form of bytes) of a .npy file, [rows, MoE
    layers, topk], as vLLM has it but without dense layers; the first row is that of token routed_experts_start."""
    rows = len(capture.routes) // shape.row_bytes
    bearer = kind.bearer_of_ids(shown)
    bearer["routed_experts"] = npy.write(npy.Ids(rows, shape.layers, shape.topk, shape.width, capture.routes))
    bearer["routed_experts_start"] = capture.start


def _alternatives(entry: Json) -> list[tuple[int, float]]:
    found = [(token_of(other), other["logprob"]) for other in entry.get("top_logprobs") or ()]
    return sorted(((token, value) for token, value in found if token is not None), key=lambda pair: -pair[1])


_COLUMNS = ("token_ids", "logprobs")
_GENERATE_COLUMNS = ("choices", "usage", "created", "prompt_token_ids")


def _ends_in_stop_token(choice: Json, params: Json) -> bool:
    if choice.get("finish_reason") != "stop" or params.get("include_stop_str_in_output"):
        return False
    if "stop_reason" not in choice:
        # vLLM before 0.32 does not tell; without stop strings only a token can have ended it.
        return choice["token_ids"][-1] in (params.get("stop_token_ids") or ()) or not params.get("stop")
    stop = choice["stop_reason"]
    return stop is None or (isinstance(stop, int) and choice["token_ids"][-1:] == [stop])  # None: the model's own EOS


def _found_stop(text: str, params: Json) -> str | None:
    """The stop string that comes first in the text of a choice that ended in one, or in a stop token."""
    stops = params.get("stop") or ()
    found = [(text.find(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    return min(found)[1] if found else None
