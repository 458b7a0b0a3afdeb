"""OpenAI's Responses through the real openai package, and tokens in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.fakes.routes import rows_of
from tests.gateway.fake_engine import FakeEngine, logprob
from tests.gateway.rig import TOKEN, Rig, text_of
from tests.gateway.test_tools import CALL, DELTAS

pytestmark = pytest.mark.asyncio
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": None,
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}


@pytest_asyncio.fixture
async def client(rig: Rig, engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with httpx.AsyncClient(trust_env=False) as http:
        yield openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=TOKEN, http_client=http, max_retries=0)


async def test_a_response(client: openai.AsyncOpenAI, rig: Rig, engine: FakeEngine) -> None:
    found = await client.responses.create(
        model="pol", instructions="Be brief", input="Capital?", store=False, max_output_tokens=5000
    )
    assert (found.output_text, found.status, found.model) == ("Paris", "completed", "pol@3")
    exchange, (turn,) = rig.daemon.ledger[0]
    assert exchange.response_id == found.id
    assert text_of(turn.prompt_ids) == "<system>Be brief<user>Capital?<assistant>"
    assert found.usage is not None and found.usage.output_tokens == 6
    cut = await client.responses.create(model="pol", input="Capital?", max_output_tokens=3)
    assert (
        cut.status == "incomplete"
        and cut.incomplete_details is not None
        and cut.incomplete_details.reason == "max_output_tokens"
    )


async def test_items_become_one_message_an_answer(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.tool_calls, engine.reasoning = [CALL], "hm"
    first = await client.responses.create(model="pol", input=[{"role": "user", "content": "a"}], tools=[TOOL])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call: Any = first.output[2]
    assert (call.name, call.arguments) == ("add", '{"a": 1}') and call.call_id.startswith("call_artd_")
    history: Any = [{"role": "user", "content": "a"}, *[item.to_dict() for item in first.output]]
    history += [{"type": "function_call_output", "call_id": call.call_id, "output": "8"},
                {"role": "user", "content": [{"type": "input_text", "text": "and?"}]}]  # fmt: skip
    await client.responses.create(
        model="pol", input=history, tools=[TOOL], tool_choice={"type": "function", "name": "add"}
    )
    given = engine.bodies("/render")[1]
    asked = {"id": call.call_id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert given["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Paris", "reasoning": "hm", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "8"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    assert given["tools"][0]["function"] == {"name": "add", "parameters": TOOL["parameters"], "strict": True}
    assert given["tool_choice"] == {"type": "function", "function": {"name": "add"}}


async def test_a_stream_ends_with_the_whole_response(client: openai.AsyncOpenAI, rig: Rig, engine: FakeEngine) -> None:
    engine.deltas = DELTAS
    async with client.responses.stream(model="pol", input="a", tools=[TOOL]) as stream:
        found = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in found if hasattr(event, "sequence_number")] == list(range(len(found)))
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "so" and final.output[2].arguments == '{"a": 1}'  # type: ignore[union-attr]
    assert final.id == rig.daemon.ledger[0][0].response_id
    kinds = [event.type for event in found]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3


async def test_what_is_not_served_is_refused_by_name(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(model="pol", input="x", previous_response_id="resp-1")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        await client.responses.create(model="pol", input="x", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.create(model="pol", input="x", background=True)
    with pytest.raises(openai.BadRequestError, match="context length"):
        await client.responses.create(model="pol", input="x" * 200)
    with pytest.raises(openai.BadRequestError, match="call_id"):
        await client.responses.create(model="pol", input=[{"type": "function_call_output", "output": "x"}])
    assert engine.bodies("/generate") == []
    engine.abort = [2]
    stream = await client.responses.create(model="pol", input="x", stream=True)
    with pytest.raises(openai.APIError, match="send it again"):
        async for _ in stream:
            pass


async def test_tokens_in_and_tokens_out(rig: Rig, engine: FakeEngine) -> None:
    from artd_schema.data.trajectory import RouteShape
    from tests.gateway.rig import merged

    sampled = [ord(char) for char in "Paris$"]
    asked = {"model": "pol", "token_ids": [104, 105], "sampling_params": {
        "temperature": 0.5, "max_tokens": 50, "stop_token_ids": [36], "logprobs": 1, "skip_special_tokens": False}}  # fmt: skip
    told = (await rig.http.post("/inference/v1/generate", json=asked)).json()
    assert "choices" in told, told
    (choice,) = told["choices"]
    assert (
        choice["token_ids"] == sampled and choice["finish_reason"] == "stop" and told["prompt_token_ids"] == [104, 105]
    )
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in sampled]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [logprob(token, 0) for token in sampled]
    exchange, (turn,) = rig.daemon.ledger[0]
    assert (exchange.response_id, text_of(turn.prompt_ids), turn.sampling.temperature) == (
        told["request_id"],
        "hi",
        0.5,
    )
    engine.routes = RouteShape(layers=2, topk=2, experts=8)
    await rig.daemon.route(merged(engine, 3, 4))
    asked["sampling_params"]["routed_experts_prompt_start"] = 3  # type: ignore[index]
    reply = await rig.http.post("/inference/v1/generate", json=asked)
    assert '"routed_experts":{"data":"' in reply.text
    import base64

    from artd_workers.gateway.engine import npy

    rows = npy.read(base64.b64decode(reply.json()["choices"][0]["routed_experts"]["data"]))
    assert rows.data == rows_of(engine.routes, 0, 2 + 5)[3 * engine.routes.row_bytes :]
    for wrong in ({"token_ids": "hi"}, {"token_ids": []}, {"token_ids": [True]}, {"stream": True}, {"features": {}}):
        assert (await rig.http.post("/inference/v1/generate", json=asked | wrong)).status_code == 400, wrong
