"""Streams: what a client sees while tokens come, what the ledger has before the stream closes, and what is left when something dies."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from artd_schema.wire import worker as w
from tests.awake import until
from tests.gateway.fake_engine import FakeEngine, logprob
from tests.gateway.rig import Rig, floats, ints, merged, text_of

pytestmark = pytest.mark.asyncio
ASKED: dict[str, Any] = {"model": "pol", "messages": [{"role": "user", "content": "Capital?"}], "stream": True}


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """The data of each event, `[DONE]` as text."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield "[DONE]" if line == "data: [DONE]" else json.loads(line[6:])


async def streamed(rig: Rig, path: str = "/v1/chat/completions", **asked: Any) -> list[Any]:
    headers = asked.pop("headers", {})
    body = ({"model": "pol", "prompt": "Capital?", "stream": True} if "chat" not in path else ASKED) | asked
    async with rig.http.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [event async for event in events(response)]


def text(found: list[Any], index: int = 0) -> str:
    choices = [one["choices"][0] for one in found if isinstance(one, dict) and one.get("choices")]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices if c["index"] == index)


async def test_a_chat_streams_and_is_in_the_ledger(rig: Rig, engine: FakeEngine) -> None:
    found = await streamed(rig, temperature=0.7, seed=5)
    assert found[-1] == "[DONE]"
    assert text(found) == "Paris"
    first, last = found[0], found[-2]
    assert first["object"] == "chat.completion.chunk" and first["choices"][0]["delta"]["role"] == "assistant"
    assert {one["id"] for one in found[:-1]} == {first["id"]} and first["model"] == "pol@3"
    assert len([one for one in found[:-1] if one["choices"][0]["delta"].get("content")]) == 3, "it came in pieces"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert [one["choices"][0]["finish_reason"] for one in found[:-2]] == [None] * (len(found) - 2)
    exchange, (turn,) = rig.daemon.ledger[0]
    assert (exchange.response_id, exchange.split, exchange.completion_tokens) == (first["id"], "train", 6)
    assert text_of(turn.token_ids) == "Paris$"
    assert floats(turn.logprobs) == [logprob(ord(char), 0) for char in "Paris$"]
    assert (turn.finish_reason, turn.policy_epoch, turn.sampling.seed) == ("stop", ((0, 4),), 5)
    assert json.loads(turn.raw)["choices"][0]["message"]["content"] == "Paris"


async def test_the_first_token_is_shown_before_the_second_is_sampled(rig: Rig, engine: FakeEngine) -> None:
    more = asyncio.Semaphore(1)
    engine.step, engine.chunk = more.acquire, 1
    async with rig.http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
        found = events(response)
        assert (await anext(found))["choices"][0]["delta"]["content"] == "P"
        for _ in range(9):
            more.release()
        assert text([one async for one in found]) == "aris"


async def test_nothing_that_closes_the_stream_comes_before_the_acknowledgement(rig: Rig, engine: FakeEngine) -> None:
    rig.daemon.acknowledge = False
    found: list[Any] = []

    async def read() -> None:
        async with rig.http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
            async for event in events(response):
                found.append(event)

    reading = asyncio.create_task(read())
    await until(lambda: rig.daemon.ledger)
    await asyncio.sleep(0.1)
    assert text(found) == "Paris"
    assert "[DONE]" not in found and all(one["choices"][0]["finish_reason"] is None for one in found)
    await rig.daemon.say(w.ExchangeAck(response_id=rig.daemon.ledger[0][0].response_id))
    await reading
    assert found[-1] == "[DONE]"


async def test_usage_comes_when_it_is_asked_for(rig: Rig, engine: FakeEngine) -> None:
    found = await streamed(rig, stream_options={"include_usage": True})
    assert found[-2]["choices"] == []
    prompt = len("<user>Capital?<assistant>")
    assert found[-2]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert found[0]["usage"] is None
    assert "usage" not in (await streamed(rig))[0]


async def test_choices_of_n_come_side_by_side(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["Paris$", "Lyon$"]
    found = await streamed(rig, n=2)
    assert (text(found, 0), text(found, 1)) == ("Paris", "Lyon")
    assert sorted(one["choices"][0]["index"] for one in found[-3:-1]) == [0, 1]
    assert [text_of(turn.token_ids) for turn in rig.daemon.ledger[0][1]] == ["Paris$", "Lyon$"]


async def test_a_completion_streams_every_prompt(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["ab$", "cd$"]
    found = await streamed(rig, "/v1/completions", prompt=["one", "three"], n=2, logprobs=1)
    assert [text(found, index) for index in range(4)] == ["ab", "cd", "ab", "cd"]
    assert found[0]["object"] == "text_completion"
    of_first = [one["choices"][0]["logprobs"] for one in found[:-1] if one["choices"][0]["index"] == 0]
    scores = [one for one in of_first if one]
    assert [value for one in scores for value in one["token_logprobs"]] == [logprob(ord(char), 0) for char in "ab$"]
    assert [value for one in scores for value in one["text_offset"]] == [0, 1, 2]
    assert [text_of(turn.prompt_ids) for turn in rig.daemon.ledger[0][1]] == ["one", "one", "three", "three"]


async def test_a_stop_string_is_never_shown(rig: Rig, engine: FakeEngine) -> None:
    engine.texts, engine.chunk = ["Paris. And more$"], 1
    found = await streamed(rig, stop=[". A"])
    assert text(found) == "Paris"
    assert text_of(rig.daemon.ledger[0][1][0].token_ids) == "Paris. A"


async def test_ids_and_logprobs_come_when_they_are_asked_for(rig: Rig, engine: FakeEngine) -> None:
    found = (await streamed(rig, return_token_ids=True, logprobs=True))[:-1]
    assert found[0]["prompt_token_ids"] == ints(rig.daemon.ledger[0][1][0].prompt_ids)
    choices = [one["choices"][0] for one in found]
    assert [token for one in choices for token in one.get("token_ids", ())] == [ord(char) for char in "Paris$"]
    scored = [entry for one in choices for entry in (one["logprobs"] or {"content": []})["content"]]
    assert [entry["logprob"] for entry in scored] == [logprob(ord(char), 0) for char in "Paris$"]
    plain = str(await streamed(rig))
    assert "token_ids" not in plain and "-0.5" not in plain


async def test_an_error_before_the_first_token_is_an_error_reply(rig: Rig, engine: FakeEngine) -> None:
    """vLLM tells it in a stream that began with 200."""
    engine.stream_error = {"message": "This model's maximum context length is 100 tokens", "code": 400}
    refused = await rig.chat(stream=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    engine.stream_error = {"message": "EngineCore is dead", "code": 500}
    failed = await rig.chat(stream=True)
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "engine_failed")
    assert rig.daemon.ledger == []
    engine.stream_error = None
    assert (await rig.chat(stream=True, bad_words=["x"])).json()["error"]["code"] == "untrainable_sampling"


async def test_a_stream_that_had_no_token_yet_is_made_again_on_a_newer_route(rig: Rig) -> None:
    await rig.limits(retry_s=5.0)
    first, second = await rig.engine("e0"), await rig.engine("e1")
    await rig.daemon.route(merged(first, 3, 4))
    first.gate.clear()
    request = asyncio.create_task(rig.chat(stream=True))
    await first.entered.wait()
    first.server.cut()
    await rig.daemon.route(merged(second, 3, 4, name="e1"))
    assert (await request).text.endswith("data: [DONE]\n\n")
    assert len(rig.daemon.ledger) == 1


async def broken(rig: Rig, engine: FakeEngine) -> list[Any]:
    """The events of a stream whose engine dies after two tokens."""
    more = asyncio.Semaphore(1)
    engine.step = more.acquire
    async with rig.http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
        found = events(response)
        seen = [await anext(found)]
        engine.server.cut()
        return seen + [one async for one in found]


async def test_an_engine_that_dies_in_a_stream_leaves_what_was_shown_in_the_ledger_as_eval(
    rig: Rig, engine: FakeEngine
) -> None:
    first, last = await broken(rig, engine)
    assert first["choices"][0]["delta"]["content"] == "Pa"
    assert last["error"]["code"] == "engine_failed" and "broke off" in last["error"]["message"]
    await until(lambda: rig.daemon.ledger)
    exchange, (turn,) = rig.daemon.ledger[0]
    assert (exchange.response_id, exchange.split) == (first["id"], "eval")
    assert (text_of(turn.token_ids), turn.finish_reason) == ("Pa", "abort")
    assert json.loads(turn.raw)["choices"][0]["message"]["content"] == "Pa"


async def test_a_push_that_aborts_a_stream_is_told_in_it(rig: Rig, engine: FakeEngine) -> None:
    engine.abort = [3]
    found = await streamed(rig)
    assert found[-1]["error"]["code"] == "aborted"
    await until(lambda: rig.daemon.ledger)
    assert (rig.daemon.ledger[0][0].split, text_of(rig.daemon.ledger[0][1][0].token_ids)) == ("eval", "Par")


async def test_a_client_that_goes_frees_its_engine_and_leaves_what_it_saw(rig: Rig, engine: FakeEngine) -> None:
    more = asyncio.Semaphore(1)
    engine.step = more.acquire
    async with rig.http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
        await anext(events(response))
        assert engine.open_streams == 1
    await until(lambda: engine.open_streams == 0)
    await until(lambda: rig.daemon.ledger)
    assert (rig.daemon.ledger[0][0].split, text_of(rig.daemon.ledger[0][1][0].token_ids)) == ("eval", "Pa")
    await rig.daemon.say(w.Hold(push=1, fence=1, engine="e0"))
    assert rig.daemon.of(w.Held)[-1].in_flight == 0


async def test_a_ledger_that_refuses_is_told_in_place_of_the_end(rig: Rig, engine: FakeEngine) -> None:
    rig.daemon.refusal = "the disk is full"
    found = await streamed(rig)
    assert "the disk is full" in found[-1]["error"]["message"]
    assert not any(one["choices"][0]["finish_reason"] for one in found[:-1])


async def test_a_client_that_does_not_read_loses_its_place(rig: Rig) -> None:
    await rig.limits(read_s=0.3)
    engine = await rig.engine(max_model_len=20_000)
    await rig.daemon.route(merged(engine, 3, 4))
    engine.texts, engine.chunk = ["x" * 12_000], 100
    for listener in rig.server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    host, port = rig.url.removeprefix("http://").split(":")
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    narrow.connect((host, int(port)))
    narrow.setblocking(False)
    _, writer = await asyncio.open_connection(sock=narrow, limit=1 << 12)
    content = json.dumps(ASKED | {"logprobs": True, "return_token_ids": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\nauthorization: {rig.bearer}\r\n\r\n"
    writer.write(head.encode() + content)
    await until(lambda: engine.open_streams == 1)
    await until(lambda: engine.open_streams == 0)
    await until(lambda: rig.daemon.ledger)
    exchange, (turn,) = rig.daemon.ledger[0]
    assert (exchange.split, turn.finish_reason) == ("eval", "abort") and 0 < len(ints(turn.token_ids)) < 12_000
    writer.transport.abort()
