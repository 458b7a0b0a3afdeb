"""`/tokenize`: the ids that a chat or a prompt would have."""

from __future__ import annotations

from artd_workers.gateway.errors import invalid
from artd_workers.gateway.request.kinds import CHAT, COMPLETION, Kind

from .base import Json


def to_render(body: Json) -> tuple[Kind, Json]:
    """Return the request whose prompt is asked for. Raises ApiError 400."""
    if body.get("return_token_strs"):
        raise invalid(
            "`return_token_strs` is not supported: leave it out", param="return_token_strs", code="unknown_field"
        )
    asked = {name: value for name, value in body.items() if name != "return_token_strs"}
    if "messages" in asked:
        return CHAT, asked
    if not isinstance(asked.get("prompt"), str):
        raise invalid("give `prompt`, a text, or `messages`", param="prompt")
    return COMPLETION, asked
