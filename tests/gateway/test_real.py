"""The gateway before the real vLLM: the openai package streams, and the ledger has what it was shown. One start of the server."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from artd_schema.wire import worker as w
from tests.engine.real import HERE, Engine, start, tool
from tests.fake_daemon import ROOT
from tests.gateway.rig import TOKEN, Rig, floats, ints, served

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
SAID: list[Any] = [{"role": "user", "content": "Say ten words. Zehn Wörter: 日本"}]


TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
TEMPLATE = (Path(__file__).parent / "tools_template.jinja").read_text()
EVAL = {"x-artd-split": "eval"}


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="artd-g-") as name:
        folder = Path(name)
        tool(str(ROOT / "tests" / "toys.py"), str(folder / "toy"), "--family", "qwen3")
        tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), f"{folder}/m0:merged:1:0")
        # With `none`, as a toy never ends its thinking.
        for engine in start(folder, "merged", chat_template=TEMPLATE, reasoning_parser="none"):
            engine.live(engine.push("m0"))
            yield engine


@pytest_asyncio.fixture
async def gateway(real: Engine, tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(stack, tmp_path)
        await rig.start()
        route = w.EngineRoute(engine="e0", socket=real.socket, mode="merged", base_model="toy", max_model_len=512,
                              served=(served(0, 4, "toy"),))  # fmt: skip
        await rig.daemon.route(route, runs=("toy",))
        yield rig


@pytest_asyncio.fixture
async def client(gateway: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with httpx.AsyncClient(trust_env=False) as http:
        yield openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=TOKEN, http_client=http, max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": SAID, "max_tokens": 40, "seed": 3} | more


@pytest.mark.asyncio
async def test_a_stream_says_what_the_whole_reply_says(client: openai.AsyncOpenAI, gateway: Rig) -> None:
    """The same seed; text, logprobs, their tokens' text and ids."""
    for logprobs in (False, True):
        whole = await client.chat.completions.create(**asked(logprobs=logprobs))
        stream = await client.chat.completions.create(
            **asked(logprobs=logprobs, stream=True, stream_options={"include_usage": True})
        )
        chunks = [chunk async for chunk in stream]
        said = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert len(said) > 20, "it came token by token"
        assert "".join(one.delta.content or "" for one in said) == whole.choices[0].message.content
        assert said[-1].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        (_, (first,)), (_, (second,)) = gateway.daemon.ledger[-2:]
        assert (first.token_ids, first.prompt_ids) == (second.token_ids, second.prompt_ids)
        assert floats(first.logprobs) == pytest.approx(floats(second.logprobs), abs=1e-4)
        if logprobs:
            entries = [entry for one in said if one.logprobs for entry in one.logprobs.content or ()]
            assert [entry.token for entry in entries] == [entry.token for entry in whole.choices[0].logprobs.content]


@pytest.mark.asyncio
async def test_choices_prompts_and_stop_strings(client: openai.AsyncOpenAI, gateway: Rig) -> None:
    whole = await client.completions.create(model="toy", prompt=["One two", "three"], n=2, seed=5, max_tokens=30)
    stream = await client.completions.create(
        model="toy", prompt=["One two", "three"], n=2, seed=5, max_tokens=30, stream=True
    )
    said = ["", "", "", ""]
    async for chunk in stream:
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert said == [choice.text for choice in whole.choices]
    stop = said[0][10:13]
    cut = await client.completions.create(model="toy", prompt="One two", n=2, seed=5, max_tokens=30, stop=[stop])
    stream = await client.completions.create(
        model="toy", prompt="One two", n=2, seed=5, max_tokens=30, stop=[stop], stream=True
    )
    shown = ["", ""]
    async for chunk in stream:
        shown[chunk.choices[0].index] += chunk.choices[0].text
    assert shown == [choice.text for choice in cut.choices] and stop not in shown[0] and len(shown[0]) < 13
    assert len(ints(gateway.daemon.ledger[-1][1][0].token_ids)) > 0


@pytest.mark.asyncio
async def test_a_client_that_goes_ends_the_request_in_the_engine(
    client: openai.AsyncOpenAI, gateway: Rig, real: Engine
) -> None:
    stream = await client.chat.completions.create(**asked(max_tokens=400, stream=True, extra_body={"ignore_eos": True}))
    await anext(aiter(stream))
    real.runs()
    await stream.close()
    real.runs_none()


@pytest.mark.asyncio
async def test_an_overflow_is_the_clients_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context length"):
        await client.chat.completions.create(
            **asked(messages=[{"role": "user", "content": "x y " * 2000}], stream=True)
        )


def forced(said: str, **more: Any) -> dict[str, Any]:
    """A request whose answer a grammar forces: a toy says nothing of itself."""
    return (
        asked(max_tokens=200, tools=[TOOL], extra_headers=EVAL, extra_body={"structured_outputs": {"choice": [said]}})
        | more
    )


SAYS = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'


@pytest.mark.asyncio
async def test_a_tool_call_comes_whole_and_streamed(client: openai.AsyncOpenAI, gateway: Rig) -> None:
    whole = (await client.chat.completions.create(**forced(SAYS))).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is not None and whole.message.content.strip() == "Let me see."
    (call,) = whole.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 7})
    async with client.chat.completions.stream(**forced(SAYS)) as stream:
        found = [event async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content.strip() == "Let me see."
    (streamed,) = final.message.tool_calls or ()
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("add", {"a": 7})
    assert streamed.id.startswith("call_artd_") and streamed.id != call.id
    assert len([one for one in found if one.type == "chunk"]) > 5, "it came in pieces"
    for exchange, (turn,) in gateway.daemon.ledger[-2:]:
        assert exchange.split == "eval"
        said = json.loads(turn.raw)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(said) == {"a": 7}


@pytest.mark.asyncio
async def test_the_conversation_goes_on_with_the_tools_answer(client: openai.AsyncOpenAI, gateway: Rig) -> None:
    call = {"id": "call_artd_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    messages = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_artd_1", "content": "8"},
    ]
    found = await client.chat.completions.create(**asked(messages=messages, tools=[TOOL], tool_choice="none"))
    assert found.choices[0].message.tool_calls is None
    assert gateway.daemon.ledger[-1][0].split == "train"


@pytest.mark.asyncio
async def test_a_required_tool_is_sampled_freely_for_training(client: openai.AsyncOpenAI, gateway: Rig) -> None:
    found = await client.chat.completions.create(**asked(tools=[TOOL], tool_choice="required", max_tokens=20))
    assert found.artd == {"grammar": "dropped"}
    bound = await client.chat.completions.create(
        **asked(tools=[TOOL], tool_choice="required", max_tokens=200, extra_headers=EVAL)
    )
    assert (bound.choices[0].message.tool_calls or [])[0].function.name == "add" or bound.choices[
        0
    ].finish_reason == "length"


@pytest.mark.asyncio
async def test_every_api_has_the_prompt_that_vllm_itself_would_make(gateway: Rig, real: Engine) -> None:
    call = {"name": "add", "arguments": '{"a": 7}'}
    of_messages = {"model": "toy", "max_tokens": 8, "system": "Be brief", "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "so"},
                                          {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 7}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "8"}, {"type": "text", "text": "y"}]},
    ], "tools": [{"name": "add", "description": "Add", "input_schema": {"type": "object", "properties": {}}}]}  # fmt: skip
    of_responses = {"model": "toy", "max_output_tokens": 8, "instructions": "Be brief", "input": [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", **call},
        {"type": "function_call_output", "call_id": "call_1", "output": "8"},
        {"role": "user", "content": "y"},
    ], "tools": [{"type": "function", "name": "add", "description": "Add", "parameters": {"type": "object", "properties": {}}}]}  # fmt: skip
    prompts = []
    for path, body in (("/v1/messages", of_messages), ("/v1/responses", of_responses)):
        answer = await gateway.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        prompts.append(ints(gateway.daemon.ledger[-1][1][0].prompt_ids))
        told = real.call(f"{path}/render", body)
        assert prompts[-1] == (told[0] if isinstance(told, list) else told)["token_ids"], path
    assert prompts[0] == prompts[1], "one conversation has one prompt, whatever API it came by"


@pytest.mark.asyncio
async def test_a_response_streams_through_the_real_package(client: openai.AsyncOpenAI, gateway: Rig) -> None:
    stream = await client.responses.create(model="toy", input="Say ten words", max_output_tokens=20, stream=True)
    found = [event async for event in stream]
    said = "".join([event.delta for event in found if event.type == "response.output_text.delta"])
    assert found[-1].type in ("response.completed", "response.incomplete"), found[-1]
    final = found[-1].response
    assert final.output_text == said and final.id == gateway.daemon.ledger[-1][0].response_id


@pytest.mark.asyncio
async def test_tokens_in_and_tokens_out(gateway: Rig, real: Engine) -> None:
    params = {"temperature": 1.0, "max_tokens": 12, "seed": 7, "logprobs": 1, "skip_special_tokens": False}
    told = (
        await gateway.http.post(
            "/inference/v1/generate", json={"model": "toy", "token_ids": [5, 6, 7], "sampling_params": params}
        )
    ).json()
    assert (
        told["choices"][0]["token_ids"] == real.generate([5, 6, 7], max_tokens=12, seed=7, temperature=1.0)["token_ids"]
    )


@pytest.mark.slow
def test_a_parser_of_another_family_does_not_start(tmp_path: Path) -> None:
    tool(str(ROOT / "tests" / "toys.py"), str(tmp_path / "toy"), "--family", "qwen3")
    with pytest.raises(AssertionError, match="tool_parser=.{0,4}pythonic.{0,4} does not find the tool call"):
        for _ in start(tmp_path, "merged", chat_template=TEMPLATE, tool_parser="pythonic"):
            pass
