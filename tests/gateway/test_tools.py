"""Tools and reasoning: how they reach a client, whole and streamed, what becomes of grammars, and which fields are taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.fake_engine import FakeEngine, logprob
from tests.gateway.rig import Rig, ints, merged
from tests.gateway.test_stream import streamed

pytestmark = pytest.mark.asyncio
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "832c42", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
DELTAS: list[dict[str, Any]] = [
    {"reasoning": "hm"},
    {"content": "so", "tool_calls": [{"index": 0, "id": "chatcmpl-tool-1", "type": "function", "function": {"name": "add"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
]  # fmt: skip


async def test_a_tool_call_has_an_id_of_the_gateway(rig: Rig, engine: FakeEngine) -> None:
    engine.tool_calls, engine.reasoning = [CALL], "hm"
    found = (await rig.chat(tools=[TOOL])).json()["choices"][0]
    (call,) = found["message"]["tool_calls"]
    assert call["id"].startswith("call_artd_") and call["function"] == CALL["function"]
    assert found["message"]["reasoning"] == found["message"]["reasoning_content"] == "hm"
    assert found["finish_reason"] == "tool_calls"
    assert engine.bodies("/render")[0]["tools"] == [TOOL]
    again = (await rig.chat(tools=[TOOL])).json()["choices"][0]["message"]["tool_calls"][0]
    assert again["id"] != call["id"]
    assert json.loads(rig.daemon.ledger[0][1][0].raw)["choices"][0]["message"]["tool_calls"] == [call]


async def test_a_lone_stop_token_is_no_reasoning(rig: Rig, engine: FakeEngine) -> None:
    """The engine's parsers take it for text, and it must be given a token."""
    engine.texts, engine.reasoning = ["$"], "<|im_end|>"
    choice = (await rig.chat()).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ""} and choice["finish_reason"] == "stop"


async def test_a_call_streams_under_one_id(rig: Rig, engine: FakeEngine) -> None:
    engine.deltas = DELTAS
    found = (await streamed(rig, tools=[TOOL]))[:-1]
    deltas = [one["choices"][0]["delta"] for one in found]
    assert [one["reasoning_content"] for one in deltas if "reasoning" in one] == ["hm"]
    calls = [one["tool_calls"][0] for one in deltas if "tool_calls" in one]
    assert [sorted(call) for call in calls] == [["function", "id", "index", "type"], ["function", "index"]]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = json.loads(rig.daemon.ledger[0][1][0].raw)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("so", "hm")
    assert message["tool_calls"] == [CALL | {"id": calls[0]["id"]}] and calls[0]["id"].startswith("call_artd_")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_is_dropped_for_training_and_the_reply_says_so(
    rig: Rig, engine: FakeEngine, stream: bool
) -> None:
    engine.extra_params = {"structured_outputs": {"json": {}}}
    asked = {"tools": [TOOL], "tool_choice": "required", "stream": stream}
    assert '"artd":{"grammar":"dropped"}' in (await rig.chat(**asked)).text
    assert "structured_outputs" not in str(
        [body for path, body in engine.calls if path.endswith(("/generate", "/artd/stream"))]
    )
    plain = await rig.chat(**asked, headers={"x-artd-split": "eval"})
    assert "dropped" not in plain.text
    last = engine.calls[-2 if not stream else -1][1]
    assert (last["generate"] if stream else last)["sampling_params"]["structured_outputs"] == {"json": {}}


async def test_a_run_may_refuse_grammars_instead(rig: Rig, engine: FakeEngine) -> None:
    import msgspec

    await rig.daemon.route(msgspec.structs.replace(merged(engine, 3, 4), grammar="refuse"))
    engine.extra_params = {"structured_outputs": {"json": {}}}
    refused = await rig.chat(tools=[TOOL], tool_choice="required")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "untrainable_sampling")
    assert "structured_outputs" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["thread", "functions", "audio", "nonsense", "use_beam_search", "chat_template"])
async def test_a_field_that_nobody_would_read_is_refused_by_name(rig: Rig, engine: FakeEngine, name: str) -> None:
    refused = await rig.chat(**{name: {"type": "create"}})
    assert (refused.status_code, refused.json()["error"]["code"], refused.json()["error"]["param"]) == (
        400,
        "unknown_field",
        name,
    )
    assert f"`{name}`" in refused.json()["error"]["message"] and engine.bodies("/generate") == []
    assert (await rig.chat(**{name: None})).status_code == 200


async def test_what_programs_send_of_themselves_is_taken(rig: Rig, engine: FakeEngine) -> None:
    """As recorded from openai-agents, langchain, pydantic-ai, inspect, ART and NeMo Gym."""
    sent = {"stream": False, "store": False, "metadata": {}, "parallel_tool_calls": False, "chat_template_kwargs": {"preserve_thinking": True},
            "nvext": {"extra_fields": ["engine_data"]}, "cache_control": {"type": "ephemeral"}, "user": "me", "tool_choice": "auto",
            "tools": [TOOL], "reasoning_effort": "low", "return_tokens_as_token_ids": True, "modalities": None}  # fmt: skip
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": "x", "prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]},
        {"role": "user", "content": "y"},
    ]  # fmt: skip
    assert (await rig.chat(**sent, messages=messages)).status_code == 200
    given = engine.bodies("/render")[0]
    assert given["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"},
    ]  # fmt: skip
    assert not {"store", "metadata", "nvext", "cache_control", "return_tokens_as_token_ids", "stream"} & given.keys()
    assert given["chat_template_kwargs"] == {"preserve_thinking": True} and given["parallel_tool_calls"] is False


@pytest.mark.parametrize("asks", ["return_token_ids", "return_tokens_as_token_ids"])
async def test_the_ids_are_where_each_program_looks_for_them(rig: Rig, engine: FakeEngine, asks: str) -> None:
    """On the message for NeMo Gym, at the top level and on the choice for ART and verifiers."""
    body = (await rig.chat(**{asks: True}, logprobs=True, top_logprobs=1)).json()
    (choice,), sampled = body["choices"], [ord(char) for char in "Paris$"]
    assert choice["message"]["generation_token_ids"] == choice["token_ids"] == sampled
    assert (
        choice["message"]["prompt_token_ids"] == body["prompt_token_ids"] == ints(rig.daemon.ledger[0][1][0].prompt_ids)
    )
    assert choice["message"]["generation_log_probs"] == [logprob(token, 0) for token in sampled]
    spelt = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert spelt == [f"token_id:{token}" for token in sampled] if "as" in asks else list("Paris$")
