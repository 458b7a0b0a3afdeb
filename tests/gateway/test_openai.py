"""The openai package talks to the gateway without special care, and its typed errors fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import TOKEN, Rig

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def client(rig: Rig, engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with httpx.AsyncClient(trust_env=False) as http:
        yield openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=TOKEN, http_client=http, max_retries=1)


async def test_chat(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Capital?"}]
    response = await client.chat.completions.create(model="pol", messages=messages, n=2, logprobs=True)
    assert [choice.message.content for choice in response.choices] == ["Paris", "Paris"]
    assert response.choices[0].logprobs is not None
    assert response.usage is not None
    assert response.usage.completion_tokens == 12


async def test_completion_and_models(client: openai.AsyncOpenAI) -> None:
    response = await client.completions.create(model="pol@3", prompt="hi", max_tokens=4)
    assert (response.model, response.choices[0].text) == ("pol@3", "Pari")
    assert [model.id async for model in client.models.list()] == ["pol", "pol@3"]


async def test_the_split_header_and_extra_body(client: openai.AsyncOpenAI, rig: Rig) -> None:
    response = await client.chat.completions.create(
        model="pol",
        messages=[{"role": "user", "content": "x"}],
        extra_headers={"x-artd-split": "eval"},
        extra_body={"return_token_ids": True},
    )
    assert rig.daemon.ledger[0][0].split == "eval"
    assert response.choices[0].message.generation_token_ids == [ord(c) for c in "Paris$"]  # type: ignore[attr-defined]


async def test_errors_are_the_packages_own_types(client: openai.AsyncOpenAI, rig: Rig) -> None:
    with pytest.raises(openai.NotFoundError, match="pol, pol@3"):
        await client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context length") as caught:
        await client.completions.create(model="pol", prompt="x" * 200)
    assert caught.value.code == "context_length_exceeded"


async def test_streams(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    stream = await client.chat.completions.create(model="pol", messages=[{"role": "user", "content": "x"}], stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Paris"
    of_text = await client.completions.create(model="pol", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in of_text]) == "Paris"
    engine.abort = [2]
    stream = await client.chat.completions.create(model="pol", messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(openai.APIError, match="send it again"):
        async for _ in stream:
            pass


async def test_the_package_sends_an_aborted_request_again(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.abort = [2]

    def recover(reply: object) -> None:
        engine.abort = None

    engine.edit = recover
    response = await client.completions.create(model="pol", prompt="x")
    assert response.choices[0].text == "Paris"
    assert len(engine.bodies("/generate")) == 2
