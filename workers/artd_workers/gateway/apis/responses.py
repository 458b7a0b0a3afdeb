"""OpenAI's Responses: items as chat messages, and chat answers as items. The client keeps the conversation and sends it whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from artd_workers.gateway.errors import ApiError, invalid
from artd_workers.gateway.http.streamed import Channel, encode_event
from artd_workers.gateway.request.fields import refusal
from artd_workers.gateway.request.kinds import CHAT

from .base import Ask, Json
from .response_items import output_items, response_of
from .responses_stream import ResponsesWriter

_KIND = replace(CHAT, prefix="resp")
_SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "top_logprobs",
    "return_token_ids",
    "chat_template_kwargs",
    "seed",
)
_EFFECTLESS = (
    "store", "metadata", "user", "include", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "truncation", "stream_options",
)  # fmt: skip
_READ = ("input", "instructions", "tools", "tool_choice", "max_output_tokens", "reasoning", "text")


class ResponsesApi:
    """`/v1/responses`; see `Api`."""

    path = "/v1/responses"

    def parse(self, body: Json) -> Ask:
        """See `Api.parse`."""
        if body.get("previous_response_id") or body.get("conversation"):
            what = "`previous_response_id` is not supported yet: send the whole conversation as `input`"
            raise invalid(what, param="previous_response_id", code="unsupported")
        for name, value in body.items():
            if name not in (*_SAME, *_EFFECTLESS, *_READ) and value not in (None, False):
                raise refusal(name)
        chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
        chat["messages"] = _messages(body.get("instructions"), body.get("input") or "")
        if tools := body.get("tools"):
            chat["tools"] = [_tool(tool) for tool in tools]
        if choice := body.get("tool_choice"):
            chat["tool_choice"] = _choice(choice)
        if (limit := body.get("max_output_tokens")) is not None:
            chat["max_tokens"] = limit
        if effort := (body.get("reasoning") or {}).get("effort"):
            chat["reasoning_effort"] = effort
        if chat.get("top_logprobs") or "message.output_text.logprobs" in (body.get("include") or ()):
            chat["logprobs"] = True
        if (form := (body.get("text") or {}).get("format")) and form.get("type") != "text":
            chat["response_format"] = _format(form)
        return Ask(_KIND, chat, caps=True)

    def reply(self, body: Json, head: Json, choices: Sequence[Json]) -> Json:
        """See `Api.reply`."""
        (choice,) = choices
        return response_of(body, head, choice, output_items(choice))

    def writer(self, body: Json, channel: Channel) -> ResponsesWriter:
        """See `Api.writer`."""
        return ResponsesWriter(body, channel)

    def error_event(self, error: ApiError) -> bytes:
        """See `Api.error_event`."""
        told: Json = {"code": error.code, "message": error.message, "param": error.param}
        # By `error` the openai package raises; what reads events knows the others.
        told |= {"type": "error", "sequence_number": 1 << 30, "error": dict(told)}
        return encode_event(told, "error")


def _messages(instructions: str | None, items: str | Sequence[Json]) -> list[Json]:
    found: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant":
                message = _assistant(found, "content")
                message["content"] = (message.get("content") or "") + _text(item.get("content") or "", where)
            case "message":
                found.append({"role": item.get("role", "user"), "content": _text(item.get("content") or "", where)})
            case "reasoning":
                _assistant(found, "reasoning", new=True)["reasoning"] = _reasoning(item, where)
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _assistant(found, "").setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item.get("output") or "", where)
                found.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case other:
                raise invalid(f"{where}: an item of type {other!r} is not supported", param=where, code="unknown_item")
    return found


def _assistant(found: list[Json], field: str, new: bool = False) -> Json:
    """Return the assistant's message that an item belongs to: the last one, unless it has that already. An answer's reasoning, text
    and calls are items of their own here, and one message in chat."""
    last = found[-1] if found else {}
    if new or last.get("role") != "assistant" or last.get(field) or (field == "content" and last.get("tool_calls")):
        found.append({"role": "assistant", "content": None})
    return found[-1]


def _reasoning(item: Json, where: str) -> str:
    parts = item.get("content") or item.get("summary") or ()
    if not parts and item.get("encrypted_content"):
        raise invalid(f"{where}: encrypted reasoning cannot be read", param=where, code="unknown_item")
    return "".join(part.get("text") or "" for part in parts)


def _text(content: str | Sequence[Json], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") not in ("input_text", "output_text", "text", "refusal"):
            raise invalid(
                f"{where}: content of type {part.get('type')!r} is not supported", param=where, code="unknown_content"
            )
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise invalid(f"tools: {tool.get('type')!r} runs on a server that artd has not: give functions", param="tools")
    return {"type": "function", "function": {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}}


_FUNCTION = ("name", "description", "parameters", "strict")


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise invalid(f"tool_choice: type {choice.get('type')!r} is not supported", param="tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}


def _format(form: Json) -> Json:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
