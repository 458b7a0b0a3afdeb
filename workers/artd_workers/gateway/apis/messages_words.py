"""How an answer ended, in Anthropic's words."""

from __future__ import annotations

from .base import Json

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def stop_words(choice: Json) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if choice.get("finish_reason") == "stop" and isinstance(choice.get("stop_reason"), str):
        return "stop_sequence", choice["stop_reason"]
    return _REASONS.get(choice["finish_reason"], "end_turn"), None
