"""Where the text of a choice ends: stop strings are cut off and stop tokens left out while it streams.

vLLM streams tokens uncut: the event in which a stop string is complete has the whole token. So the text that a stop string may still need is
held back, at most one character less than the longest has.
"""

from __future__ import annotations

from typing import Any

from artd_workers.engines.vllm import stops

Json = dict[str, Any]


class Cut:
    """Cuts the text of one choice on its way to the client. `params` are the `sampling_params` as rendered."""

    def __init__(self, params: Json) -> None:
        self._params = params
        given = params.get("stop") or ()
        found = (given,) if isinstance(given, str) else given
        keeps = params.get("include_stop_str_in_output")
        self._hold = 0 if keeps else max((len(stop) for stop in found), default=1) - 1
        self._held = ""

    def shown_ids(self, choice: Json) -> list[int]:
        """Return the tokens of an event that become text: all but the stop token that ended the choice."""
        tokens: list[int] = choice["token_ids"]
        return tokens[:-1] if tokens and stops.ends_in_stop_token(choice, self._params) else tokens

    def push(self, text: str, choice: Json) -> str:
        """Take the text of an event; return what the client may see by now."""
        text, self._held = self._held + text, ""
        if choice.get("finish_reason") is not None:
            return stops.cut_string(text, choice, self._params)
        if self._hold:
            text, self._held = text[: -self._hold], text[-self._hold :]
        return text
