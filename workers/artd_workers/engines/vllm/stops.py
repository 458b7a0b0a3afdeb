"""Decides how a choice ended, and what of its text the client sees.

vLLM's derender decodes every sampled token, also those after which its own chat endpoint cuts the text: the stop string, the
stop token and the EOS (which is text where the client sets `skip_special_tokens: false`). The text is cut here; the ledger
keeps every sampled token.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def for_derender(reply: Json, params: Json, response_id: str, *, logprobs: bool) -> Json:
    """Return a generate reply for derender: with our id, without stop token, and with logprobs only on request."""
    choices = []
    for choice in reply["choices"]:
        tokens = choice["token_ids"]
        seen = tokens[:-1] if ends_in_stop_token(choice, params) and len(tokens) > 1 else tokens
        choices.append(choice | {"token_ids": seen, "logprobs": choice.get("logprobs") if logprobs else None})
    return reply | {"request_id": response_id, "choices": choices}


def cut_text(text: str, choice: Json, params: Json) -> str:
    """Return the text of a choice without the stop string or stop token that ended it.

    Generation ends at the first match, so the first occurrence counts, unless min_tokens made the engine pass some.
    """
    if ended_by_string(text, choice, params):
        return cut_string(text, choice, params)
    return "" if says_nothing(choice, params) else text


def says_nothing(choice: Json, params: Json) -> bool:
    """Return whether a choice is a stop token and nothing else."""
    return len(choice["token_ids"]) == 1 and ends_in_stop_token(choice, params)


def ended_by_string(text: str, choice: Json, params: Json) -> str:
    """Return the stop string that ended a choice and is no text; "" if none did."""
    if params.get("include_stop_str_in_output") or choice.get("finish_reason") != "stop":
        return ""
    stop = choice["stop_reason"] if "stop_reason" in choice else _found_stop(text, params)
    return stop if isinstance(stop, str) else ""


def cut_string(text: str, choice: Json, params: Json) -> str:
    """Return a text without the stop string that ended it, and without what is behind it."""
    stop = ended_by_string(text, choice, params)
    at = (text.rfind(stop) if params.get("min_tokens") else text.find(stop)) if stop else -1
    return text if at < 0 else text[:at]


def ends_in_stop_token(choice: Json, params: Json) -> bool:
    if choice.get("finish_reason") != "stop" or params.get("include_stop_str_in_output"):
        return False
    if "stop_reason" not in choice:
        # vLLM before 0.32 does not report what ended the choice. Without stop strings only a token can have.
        return choice["token_ids"][-1] in (params.get("stop_token_ids") or ()) or not params.get("stop")
    stop = choice["stop_reason"]
    return stop is None or (isinstance(stop, int) and choice["token_ids"][-1:] == [stop])  # None: the model's own EOS


def _found_stop(text: str, params: Json) -> str | None:
    """Return the first stop string in the text of a choice that ended in a stop string or a stop token, else None."""
    stops = params.get("stop") or ()
    found = [(text.find(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    return min(found)[1] if found else None
