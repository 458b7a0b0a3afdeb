"""The message that deltas make: what the client was shown of one choice, for the ledger."""

from __future__ import annotations

from .kinds import Kind
from .reply import own_call_id
from .request import Json


class Message:
    """One choice of a stream."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, Json] = {}
        self._scores: list[Json] = []

    def add(self, shown: Json) -> Json:
        """Take what an event shows; return it with the gateway's ids of tool calls."""
        if text := shown.get("content"):
            self._content.append(text)
        if text := shown.get("reasoning"):
            self._reasoning.append(text)
        self._scores += shown.get("logprobs") or ()
        if calls := shown.get("tool_calls"):
            return shown | {"tool_calls": [self._call(call) for call in calls]}
        return shown

    def choice(self, kind: Kind, choice: Json) -> Json:
        """Return the choice as a whole reply has it. choice: the engine's."""
        ended = {"finish_reason": choice.get("finish_reason"), "stop_reason": choice.get("stop_reason")}
        content = "".join(self._content)
        if not kind.chat:
            return {"text": content, "logprobs": kind.scores(self._scores), **ended}
        message: Json = {"role": "assistant", "content": content if content or not self._calls else None}
        if reasoning := "".join(self._reasoning):
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return {"message": message, "logprobs": kind.scores(self._scores), **ended}

    def _call(self, delta: Json) -> Json:
        """Join a delta of a tool call to those before it; return it with our id."""
        index, function = delta.get("index", 0), delta.get("function") or {}
        known = self._calls.get(index)
        if known is None:
            known = {"id": own_call_id(delta.get("id")), "type": "function", "function": {"name": "", "arguments": ""}}
            self._calls[index] = known
            delta = delta | {"id": known["id"], "type": "function"}
        else:
            delta = {name: value for name, value in delta.items() if name not in ("id", "type")}
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""
        return delta
