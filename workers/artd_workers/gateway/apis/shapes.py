"""The form of an error, by the path that was asked: Anthropic's below /v1/messages, OpenAI's elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec

from artd_workers.gateway.errors import ApiError

MESSAGES = "/v1/messages"
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error",
}  # fmt: skip


def error_body(path: str, error: ApiError) -> bytes:
    """Return the body of an error reply."""
    return msgspec.json.encode(anthropic_error(error)) if path.startswith(MESSAGES) else error.body()


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error as Anthropic's clients read it; `code` is artd's word for it."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": error.message, "code": error.code}
    if error.code == THREAD:
        told["details"] = {"error_code": THREAD, "unsupported": []}
    return {"type": "error", "error": told}


THREAD = "thread_unsupported_request"
"""By which Anthropic's tool runner goes on without threads kept on the server, and sends the whole conversation."""
