"""Fields of a request's body: those that the engine is given, those that have no effect, and all others, which are refused by name."""

from __future__ import annotations

from typing import Any

from artd_workers.gateway.errors import ApiError, invalid

Json = dict[str, Any]
_SAMPLING = frozenset(
    [
        "model",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
    ]
)
_CHAT = _SAMPLING | frozenset(
    [
        "messages",
        "max_completion_tokens",
        "parallel_tool_calls",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "tools",
        "top_logprobs",
    ]
)
_COMPLETION = _SAMPLING | frozenset(("prompt", "echo"))
_GATEWAY = frozenset(("return_token_ids", "return_tokens_as_token_ids"))
_EFFECTLESS = frozenset(
    [
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "include",
        "cache_control",
        "nvext",
    ]
)
"""Notes to another service: they change nothing about the answer."""


def refuse_unknown(chat: bool, body: Json, engine: frozenset[str]) -> None:
    """engine: the engine's own fields. Raises ApiError 400 for a field that would have no effect, though it asks for one."""
    known = (_CHAT if chat else _COMPLETION) | _GATEWAY | _EFFECTLESS | engine
    for name, value in body.items():
        if name not in known and value is not None:
            raise refusal(name)
    if body.get("modalities") not in (None, ["text"]):
        raise refusal("modalities")


def refusal(name: str) -> ApiError:
    """Return the error for a field that is not supported."""
    return invalid(f"the field `{name}` is not supported: leave it out", param=name, code="unknown_field")


def for_engine(body: Json, model: str) -> Json:
    """Return the client's body as the engine shall see it."""
    kept = {name: value for name, value in body.items() if name not in _OURS}
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_message(one) if isinstance(one, dict) else one for one in messages]
    return kept | {"model": model}


def cap_tokens(body: Json, most: int) -> None:
    """Lower a limit above the context's length to it; the engine gives what the prompt leaves."""
    if isinstance(limit := body.get("max_tokens"), int) and limit > most:
        body["max_tokens"] = most


_OURS = _GATEWAY | _EFFECTLESS | {"stream", "stream_options", "request_id"}
"""Body fields that the gateway answers for itself."""
_OF_REPLIES = frozenset((
    "prompt_token_ids", "generation_token_ids", "generation_log_probs", "generation_top_log_probs", "routed_experts",
    "routed_experts_start",
))  # fmt: skip
"""What the gateway adds to a message, and some programs send back."""


def _message(message: Json) -> Json:
    """Return a message as templates know it: `developer` is what OpenAI calls `system` now."""
    kept = {name: value for name, value in message.items() if name not in _OF_REPLIES}
    return kept | {"role": "system"} if kept.get("role") == "developer" else kept
