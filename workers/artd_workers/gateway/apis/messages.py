"""Anthropic's Messages: its requests as chat bodies, and chat answers as messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from artd_workers.gateway.errors import ApiError, invalid
from artd_workers.gateway.http.streamed import Channel, encode_event
from artd_workers.gateway.request.fields import refusal
from artd_workers.gateway.request.kinds import CHAT

from .base import Ask, Json
from .messages_stream import MessagesWriter
from .messages_words import stop_words
from .shapes import MESSAGES, THREAD, anthropic_error

_KIND = replace(CHAT, prefix="msg")
_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "stream",
    "return_token_ids",
    "chat_template_kwargs",
    "seed",
)
_EFFECTLESS = ("metadata", "service_tier", "cache_control", "container", "inference_geo", "betas")
_READ = ("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "thread")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesApi:
    """`/v1/messages`; see `Api`."""

    path = MESSAGES

    def parse(self, body: Json) -> Ask:
        """See `Api.parse`."""
        if body.get("thread"):
            raise ApiError(400, THREAD, "`thread` is not supported: send the whole conversation", param="thread")
        for name, value in body.items():
            if name not in (*_SAME, *_EFFECTLESS, *_READ) and value is not None:
                raise refusal(name)
        chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
        chat["messages"] = _messages(body)
        if tools := body.get("tools"):
            chat["tools"] = [_tool(tool) for tool in tools]
        if body.get("stop_sequences"):
            chat["stop"] = body["stop_sequences"]
        _choose(chat, body.get("tool_choice") or {})
        thinking = (body.get("thinking") or {}).get("type")
        if thinking in ("enabled", "disabled"):
            chat["chat_template_kwargs"] = (chat.get("chat_template_kwargs") or {}) | {
                "enable_thinking": thinking == "enabled"
            }
        return Ask(_KIND, chat, caps=True)

    def reply(self, body: Json, head: Json, choices: Sequence[Json]) -> Json:
        """See `Api.reply`."""
        (choice,) = choices
        usage = {"input_tokens": head["usage"]["prompt_tokens"], "output_tokens": head["usage"]["completion_tokens"]}
        extra = {name: choice["message"][name] for name in _IDS if name in choice["message"]}
        reason, sequence = stop_words(choice)
        return {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"],
                "content": _blocks(choice["message"]), "stop_reason": reason, "stop_sequence": sequence,
                "usage": usage} | extra | ({"artd": head["artd"]} if "artd" in head else {})  # fmt: skip

    def writer(self, body: Json, channel: Channel) -> MessagesWriter:
        """See `Api.writer`."""
        return MessagesWriter(channel)

    def error_event(self, error: ApiError) -> bytes:
        """See `Api.error_event`."""
        return encode_event(anthropic_error(error), "error")


_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts", "routed_experts_start")


def _messages(body: Json) -> list[Json]:
    found: list[Json] = []
    if system := body.get("system"):
        found.append({"role": "system", "content": _text(system, "system")})
    for number, message in enumerate(body.get("messages") or ()):
        where, content = f"messages[{number}]", message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if message.get("role") == "assistant":
            found.append(_assistant(blocks, where))
        else:
            found += _user(message.get("role", "user"), blocks, where)
    return found


def _assistant(blocks: Sequence[Json], where: str) -> Json:
    text, thinking, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "text":
                text.append(block["text"])
            case "thinking":
                thinking.append(block["thinking"])
            case "tool_use":
                function = {
                    "name": block["name"],
                    "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
                }
                calls.append({"id": block["id"], "type": "function", "function": function})
            case other:
                raise _unknown_block(other, where)
    message: Json = {"role": "assistant", "content": "".join(text) if text or not calls else None}
    message |= {"reasoning": "".join(thinking)} if thinking else {}
    return message | ({"tool_calls": calls} if calls else {})


def _user(role: str, blocks: Sequence[Json], where: str) -> list[Json]:
    """Return the answers of tools, then what the user says."""
    results, said = [], []
    for block in blocks:
        match block.get("type"):
            case "tool_result":
                content = _text(block.get("content") or "", where)
                results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
            case "text":
                said.append({"type": "text", "text": block["text"]})
            case other:
                raise _unknown_block(other, where)
    if not said:
        return results
    return [*results, {"role": role, "content": said[0]["text"] if len(said) == 1 else said}]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.get("type") != "text":
            raise _unknown_block(block.get("type"), where)
    return "\n".join(block["text"] for block in content)


def _unknown_block(kind: Any, where: str) -> ApiError:
    return invalid(f"{where}: content of type {kind!r} is not supported", param=where, code="unknown_content")


def _tool(tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise invalid(
            f"tools: {tool['type']!r} runs on a server that artd has not: give tools of your own", param="tools"
        )
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object", "properties": {}}}
    return {
        "type": "function",
        "function": function | ({"description": tool["description"]} if tool.get("description") else {}),
    }


def _choose(chat: Json, choice: Json) -> None:
    if choice.get("type") == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif choice:
        if choice.get("type") not in _CHOICES:
            raise invalid(f"tool_choice: unknown type {choice.get('type')!r}", param="tool_choice")
        chat["tool_choice"] = _CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _blocks(message: Json) -> list[Json]:
    found: list[Json] = []
    if message.get("reasoning"):
        found.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
    if message.get("content"):
        found.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        found.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        )
    return found


def _input(arguments: str) -> Json:
    """Return a call's arguments; what the model wrote is in `invalid_json` where it is no JSON object."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"invalid_json": arguments}
