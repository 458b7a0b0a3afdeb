"""A response and its items, as OpenAI's Responses have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Json, item_id

_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled", "user": None,
    "reasoning": {"effort": None, "summary": None}, "store": False,
}  # fmt: skip
"""What a response repeats of its request, with the values of what was not sent."""


def begun_response(body: Json, head: Json) -> Json:
    """Return a response without an answer. head: `id`, `created`, `model`."""
    echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
    notes = {"artd": head["artd"]} if "artd" in head else {}
    return {"id": head["id"], "object": "response", "created_at": head["created"], "model": head["model"], "status": "in_progress",
            "error": None, "incomplete_details": None, "output": [], "previous_response_id": None, "usage": None} | echoed | notes  # fmt: skip


def response_of(body: Json, head: Json, choice: Json, output: Sequence[Json]) -> Json:
    """Return a response that has ended. head, choice: as of a whole chat reply."""
    cut = choice["finish_reason"] == "length"
    told = head["usage"]
    usage = {"input_tokens": told["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
             "output_tokens": told["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
             "total_tokens": told["total_tokens"]}  # fmt: skip
    message = choice["message"]
    ids = {
        name: message[name]
        for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        if name in message
    }
    return begun_response(body, head) | ids | {
        "status": "incomplete" if cut else "completed", "usage": usage, "output": list(output),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }  # fmt: skip


def output_items(choice: Json) -> list[Json]:
    """Return the items of a chat answer: reasoning, message, calls."""
    message = choice["message"]
    found: list[Json] = []
    if reasoning := message.get("reasoning"):
        found.append(reasoning_item(item_id("rs"), reasoning))
    if (text := message.get("content")) or not message.get("tool_calls"):
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        found.append(message_item(item_id("msg"), text or "", logprobs))
    for call in message.get("tool_calls") or ():
        found.append(call_item(item_id("fc"), call["id"], call["function"]["name"], call["function"]["arguments"]))
    return found


def reasoning_item(name: str, text: str) -> Json:
    """Return reasoning that has ended."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": name, "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def message_item(name: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    """Return a message that has ended."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def call_item(name: str, call_id: str, function: str, arguments: str) -> Json:
    """Return a function call that has ended."""
    return {
        "id": name,
        "type": "function_call",
        "call_id": call_id,
        "name": function,
        "arguments": arguments,
        "status": "completed",
    }
