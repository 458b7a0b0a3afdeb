"""Anthropic's Messages: what becomes of a request, and what comes back, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import TOKEN, Rig, text_of
from tests.gateway.test_tools import CALL, DELTAS

pytestmark = pytest.mark.asyncio
TOOL = {"name": "add", "description": "Add", "input_schema": {"type": "object", "properties": {}}}


async def ask(rig: Rig, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    asked = {"model": "pol", "max_tokens": 32000, "messages": [{"role": "user", "content": "Capital?"}]} | body
    return await rig.http.post(path, json=asked)


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """(name, data) of each event; both say its type."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


async def test_a_message(rig: Rig, engine: FakeEngine) -> None:
    body = (await ask(rig, system="Be brief", stop_sequences=["!"])).json()
    assert (body["type"], body["role"], body["model"], body["stop_reason"]) == (
        "message",
        "assistant",
        "pol@3",
        "end_turn",
    )
    assert body["content"] == [{"type": "text", "text": "Paris"}]
    exchange, (turn,) = rig.daemon.ledger[0]
    assert exchange.response_id == body["id"]
    assert text_of(turn.prompt_ids) == "<system>Be brief<user>Capital?<assistant>"
    assert body["usage"] == {"input_tokens": exchange.prompt_tokens, "output_tokens": 6}
    assert engine.bodies("/render")[0]["max_tokens"] == 100, "more than the context has is what it has"
    assert engine.bodies("/render")[0]["stop"] == ["!"]


async def test_a_stop_sequence_and_a_limit_are_told(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["ab!cd"]
    body = (await ask(rig, stop_sequences=["!"])).json()
    assert (body["stop_reason"], body["stop_sequence"], body["content"][0]["text"]) == ("stop_sequence", "!", "ab")
    assert (await ask(rig, max_tokens=2)).json()["stop_reason"] == "max_tokens"


async def test_history_becomes_chat(rig: Rig, engine: FakeEngine) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "call_artd_1", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_artd_1", "content": [{"type": "text", "text": "8"}]},
            {"type": "text", "text": "and?"},
        ]},
    ]  # fmt: skip
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    assert (
        await ask(rig, messages=messages, tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"})
    ).status_code == 200
    given = engine.bodies("/render")[0]
    assert given["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "so", "reasoning": "hm",
         "tool_calls": [{"id": "call_artd_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "call_artd_1", "content": "8"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    function = {"name": "add", "description": "Add", "parameters": TOOL["input_schema"]}
    assert given["tools"] == [{"type": "function", "function": function}]
    assert given["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert given["parallel_tool_calls"] is False and given["chat_template_kwargs"] == {"enable_thinking": False}


async def test_thinking_and_tools_come_as_blocks(rig: Rig, engine: FakeEngine) -> None:
    engine.tool_calls, engine.reasoning = [CALL], "hm"
    body = (await ask(rig, tools=[TOOL])).json()
    thinking, text, call = body["content"]
    assert (thinking["thinking"], text["text"], call["name"], call["input"]) == ("hm", "Paris", "add", {"a": 1})
    assert body["stop_reason"] == "tool_use" and call["id"].startswith("call_artd_")
    engine.tool_calls = [CALL | {"function": {"name": "add", "arguments": "{bad"}}]
    assert (await ask(rig, tools=[TOOL])).json()["content"][2]["input"] == {"invalid_json": "{bad"}


async def test_a_stream_has_blocks_one_after_the_other(rig: Rig, engine: FakeEngine) -> None:
    engine.deltas = DELTAS
    found = events(await ask(rig, tools=[TOOL], stream=True))
    assert [name for name, _ in found] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "content_block_start", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert [data["index"] for name, data in found if name == "content_block_start"] == [0, 1, 2]
    deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert json.loads(deltas[-1]["partial_json"]) == {"a": 1}
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[0][1]["message"]["id"] == rig.daemon.ledger[0][0].response_id


async def test_errors_have_anthropics_form(rig: Rig, engine: FakeEngine) -> None:
    refused = await ask(rig, nonsense=1)
    assert refused.status_code == 400 and "`nonsense`" in refused.json()["error"]["message"]
    assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "invalid_request_error")
    long = (await ask(rig, messages=[{"role": "user", "content": "x" * 200}])).json()["error"]
    assert "context length" in long["message"]
    assert (await ask(rig, model="nope")).json()["error"]["type"] == "not_found_error"
    assert (
        "content"
        in (await ask(rig, messages=[{"role": "user", "content": [{"type": "image"}]}])).json()["error"]["message"]
    )
    assert (await ask(rig, messages=[7])).status_code == 400
    assert (await ask(rig, messages=[{"role": "user", "content": [{"type": "text"}]}])).status_code == 400
    async with httpx.AsyncClient(base_url=rig.url, trust_env=False) as http:
        assert (await http.post("/v1/messages", json={})).json()["error"]["type"] == "authentication_error"
        assert (await http.get("/v1/models", headers={"x-api-key": TOKEN})).status_code == 200
    engine.abort = [2]
    assert events(await ask(rig, stream=True))[-1][1]["error"]["code"] == "aborted"


async def test_a_thread_is_refused_so_that_the_tool_runner_goes_on_without(rig: Rig, engine: FakeEngine) -> None:
    told = (await ask(rig, thread={"type": "create"})).json()["error"]
    assert told["details"] == {"error_code": "thread_unsupported_request", "unsupported": []} and engine.calls == []


async def test_tokens_are_counted_without_sampling(rig: Rig, engine: FakeEngine) -> None:
    counted = (await ask(rig, "/v1/messages/count_tokens")).json()
    assert counted == {"input_tokens": len("<user>Capital?<assistant>")}
    told = (
        await rig.http.post("/tokenize", json={"model": "pol", "messages": [{"role": "user", "content": "hi"}]})
    ).json()
    assert ("".join(map(chr, told["tokens"])), told["count"], told["max_model_len"]) == ("<user>hi<assistant>", 19, 100)
    assert (await rig.http.post("/tokenize", json={"model": "pol", "prompt": "hi"})).json()["tokens"] == [104, 105]
    assert engine.bodies("/generate") == [] and rig.daemon.ledger == []
