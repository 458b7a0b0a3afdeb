"""Rollouts by name: which requests belong to one, lost replies and retries, and what is trained of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from starlette.requests import Request

from artd.errors import Conflict, NotFound
from artd_schema.data.trajectory import ExchangeRef
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.deliveries import Delivery
from artd_workers.gateway.http.streamed import Whole
from tests.awake import until
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.ledgered import Ledgered, cut, ledgered
from tests.gateway.rig import LIMITS, TOKEN, Rig, merged, text_of

pytestmark = pytest.mark.asyncio
ASK: dict[str, Any] = {"model": "pol", "messages": [{"role": "user", "content": "Capital?"}]}
CHAT = "/v1/chat/completions"
AGAIN = {"x-stainless-retry-count": "1"}


@pytest_asyncio.fixture
async def ledger(rig: Rig, tmp_path: Path) -> AsyncIterator[Ledgered]:
    async with ledgered(rig, tmp_path) as daemon:
        engine = await rig.engine()
        engine.max_model_len = 1000
        await daemon.route(merged(engine, 3, 4))
        rig.the_engine = engine  # type: ignore[attr-defined]
        yield daemon


@pytest.fixture
def scripted(ledger: Ledgered, rig: Rig) -> FakeEngine:
    """The engine of the rig with the ledger."""
    found: FakeEngine = rig.the_engine  # type: ignore[attr-defined]
    return found


def lose(rig: Rig, ledger: Ledgered, times: int = 1) -> None:
    """Break the connections of the next rollouts whose answers are durable, before their replies leave."""
    left = [times]

    async def committed(exchange: w.Exchange) -> None:
        if left[0] and exchange.rollout and not exchange.part:
            left[0] -= 1
            assert cut(rig, exchange.rollout) == 1
            await asyncio.sleep(0.02)  # until the gateway has seen it

    ledger.committed = committed


async def lost(rig: Rig, name: str, **body: Any) -> None:
    """Ask, and lose the reply; the gateway has told so."""
    told = len(rig.daemon.of(Delivery))
    with pytest.raises(httpx.HTTPError):
        await rig.http.post(f"/rollouts/{name}{CHAT}", json=ASK | body)
    await until(lambda: len(rig.daemon.of(Delivery)) > told)


# ---- which requests belong to a rollout ------------------------------------------------------------------------------


async def test_the_whole_tree_is_below_a_rollouts_url(rig: Rig, engine: FakeEngine) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: ASK,
        "/v1/completions": {"model": "pol", "prompt": "x"},
        "/v1/responses": {"model": "pol", "input": "x"},
        "/v1/messages": ASK | {"max_tokens": 20},
        "/inference/v1/generate": {"model": "pol", "token_ids": [65]},
    }
    for path, body in bodies.items():
        assert (await rig.http.post(f"/rollouts/t7{path}", json=body)).status_code == 200, path
    told = [exchange for exchange, _ in rig.daemon.ledger]
    assert [exchange.rollout for exchange in told] == ["t7"] * len(bodies)
    assert [exchange.place for exchange in told] == sorted({exchange.place for exchange in told})
    assert len({exchange.request for exchange in told}) == len(bodies)
    assert (await rig.http.get("/rollouts/t7/v1/models")).json()["data"][0]["id"] == "pol"
    assert (await rig.http.post("/rollouts/t7/tokenize", json=ASK)).json()["count"]
    counted = await rig.http.post("/rollouts/t7/v1/messages/count_tokens", json=ASK | {"max_tokens": 9})
    assert counted.json()["input_tokens"]
    assert (await rig.http.get("/rollouts/t7/v1/nowhere")).status_code == 404
    assert (await rig.http.get("/rollouts/t7")).status_code == 404
    async with rig.client("wrong") as stranger:
        assert (await stranger.get("/rollouts/t7/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("path", "headers", "rollout"),
    [
        ("", {}, ""),
        ("", {"x-session-id": "s1"}, "s1"),
        ("", {"x-artd-rollout": "r1", "x-session-id": "s1"}, "r1"),
        ("/rollouts/p1", {"x-artd-rollout": "r1", "x-session-id": "s1"}, "p1"),
        ("/rollouts/a%3Fb%25", {}, "a?b%"),
    ],
)
async def test_the_path_counts_before_the_headers(
    rig: Rig, engine: FakeEngine, path: str, headers: dict[str, str], rollout: str
) -> None:
    assert (await rig.http.post(f"{path}{CHAT}", json=ASK, headers=headers)).status_code == 200
    assert [exchange.rollout for exchange, _ in rig.daemon.ledger] == [rollout]
    assert bool(rig.daemon.ledger[0][0].request) == bool(rollout) == bool(rig.daemon.of(Delivery))


@pytest.mark.parametrize("name", ["-x", "x y", "x" * 201, "ä", "."])
async def test_a_name_that_is_none_is_a_400(rig: Rig, engine: FakeEngine, name: str) -> None:
    told = await rig.http.post(CHAT, json=ASK, headers={"x-session-id": name.encode()})
    assert (told.status_code, told.json()["error"]["code"]) == (400, "invalid_rollout")
    assert "x-session-id" in told.json()["error"]["message"] and rig.daemon.ledger == []


async def test_the_daemon_hears_how_a_reply_ended(rig: Rig, engine: FakeEngine) -> None:
    for stream in (False, True):
        await rig.http.post(f"/rollouts/t{CHAT}", json=ASK | {"stream": stream})
    await until(lambda: len(rig.daemon.of(Delivery)) == 2)
    ids = [exchange.response_id for exchange, _ in rig.daemon.ledger]
    assert rig.daemon.of(Delivery) == [Delivery(run="pol", response_id=one, whole=True) for one in ids]


# ---- lost replies --------------------------------------------------------------------------------------------------------


class Failing(FakeEngine):
    """Of every three times that a program asks, it answers nothing the first time, and breaks the program's connection the second time."""

    rig: Rig
    attempts: Counter[str]

    async def _generate(self, request: Any, body: dict[str, Any]) -> Any:
        reply = await super()._generate(request, body)
        name = "".join(map(chr, body["token_ids"])).partition("I am ")[2].partition(".")[0]
        self.attempts[name] += 1
        if self.attempts[name] % 3 == 1:
            reply["choices"][0]["token_ids"] = []  # what no engine may answer
        elif self.attempts[name] % 3 == 2:
            assert cut(self.rig, name) == 1
        return reply


async def test_eight_rollouts_with_three_retries_each_are_eight_trajectories(
    rig: Rig, ledger: Ledgered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real package: the third attempt of each request loses its reply when the ledger has it, and the fourth gets that."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)
    engine = await rig.engine("failing", make=Failing, max_model_len=1000)
    assert isinstance(engine, Failing)
    engine.rig, engine.attempts = rig, Counter()
    await ledger.route(merged(engine, 3, 4, name="failing"))
    lose(rig, ledger, 16)
    names = [f"t{number}" for number in range(8)]
    said = await asyncio.gather(*(converse(rig, name) for name in names))
    assert engine.attempts == dict.fromkeys(names, 6) and len(await ledger.deliveries()) == 16
    assert set(await ledger.deliveries()) == {(name, "delivered") for name in names}
    trained = [await ledger.submit(name, float(index)) for index, name in enumerate(names)]
    assert [[turn.response_id for turn in turns] for turns in trained] == said
    assert len({turn.response_id for turns in trained for turn in turns}) == 16
    for first, second in trained:
        assert second.prompt_ids.startswith(first.prompt_ids)
    assert (await ledger.store.read("SELECT count(*) FROM trajectory"))[0][0] == 8


async def converse(rig: Rig, name: str) -> list[str]:
    """Two turns with the openai package; the ids of the responses that it had."""
    messages: list[Any] = [{"role": "user", "content": f"I am {name}. Capital?"}]
    ids = []
    async with httpx.AsyncClient(trust_env=False) as http:
        client = openai.AsyncOpenAI(
            base_url=f"{rig.url}/rollouts/{name}/v1", api_key=TOKEN, http_client=http, max_retries=3
        )
        for _ in range(2):
            answer = await client.chat.completions.create(model="pol", messages=messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, messages[0]]
            ids.append(answer.id)
    return ids


BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASK | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2},
    "/v1/completions": {"model": "pol", "prompt": ["x", "y"], "logprobs": 2, "n": 2},
    "/v1/responses": {"model": "pol", "input": "x"},
    "/v1/messages": ASK | {"max_tokens": 20},
    "/inference/v1/generate": {"model": "pol", "token_ids": [65], "sampling_params": {"logprobs": 1}},
}


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stored_reply_is_the_reply_that_was_lost(
    rig: Rig, ledger: Ledgered, scripted: FakeEngine, path: str, spelled: bool
) -> None:
    body = BODIES[path] | ({"return_tokens_as_token_ids": True} if spelled and path == CHAT else {})
    whole = (await rig.http.post(f"/rollouts/a{path}", json=body)).json()
    lose(rig, ledger)
    with pytest.raises(httpx.HTTPError):
        await rig.http.post(f"/rollouts/b{path}", json=body)
    generated = len(scripted.bodies("/generate"))
    stored = await rig.http.post(f"/rollouts/b{path}", json=body, headers=AGAIN)
    assert stored.status_code == 200 and len(scripted.bodies("/generate")) == generated, "sampled again"
    assert anonymous(stored.json()) == anonymous(whole)
    assert await ledger.deliveries() == [(name, "delivered") for name in ("a", "b") for _ in range(choices_of(body))]


def choices_of(body: dict[str, Any]) -> int:
    return body.get("n", 1) * (len(body["prompt"]) if "prompt" in body else 1)


def anonymous(value: Any) -> Any:
    """A reply without what is made anew for every one."""
    if isinstance(value, dict):
        gone = ("id", "created", "created_at", "completed_at", "request_id")
        return {name: anonymous(one) for name, one in value.items() if name not in gone}
    return [anonymous(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_lost_its_end_is_shown_again(
    rig: Rig, ledger: Ledgered, scripted: FakeEngine, path: str
) -> None:
    body = {"model": "pol", "stream": True} | {
        name: BODIES[path][name] for name in BODIES[path] if name not in ("n", "logprobs", "top_logprobs")
    }
    lose(rig, ledger)
    with pytest.raises(httpx.HTTPError):
        await rig.http.post(f"/rollouts/b{path}", json=body)
    asked = len(scripted.calls)
    stored = await rig.http.post(f"/rollouts/b{path}", json=body, headers=AGAIN)
    assert len(scripted.calls) == asked and "Paris" in stored.text
    assert any(end in stored.text for end in ("[DONE]", "message_stop", "response.completed"))
    assert {delivery for _, delivery in await ledger.deliveries()} == {"delivered"}


async def test_what_is_asked_again_otherwise_is_superseded_and_never_trained(rig: Rig, ledger: Ledgered) -> None:
    lose(rig, ledger)
    await lost(rig, "t")
    assert await ledger.deliveries() == [("t", "lost")]
    kept = (await rig.http.post(f"/rollouts/t{CHAT}", json=ASK)).json()["id"]
    assert await ledger.deliveries() == [("t", "superseded"), ("t", "delivered")]
    (first,) = await ledger.store.read("SELECT response_id FROM exchange WHERE delivery = 'superseded'")
    with pytest.raises(Conflict, match="superseded"):
        refs = (ExchangeRef(first[0]),)
        await ledger.ingest.submit(api.Submit(run="pol", group="x", reward=1.0, refs=refs), [])
    assert [turn.response_id for turn in await ledger.submit("t")] == [kept]


async def test_a_reply_that_was_lost_and_never_asked_again_is_not_trained(rig: Rig, ledger: Ledgered) -> None:
    kept = (await rig.http.post(f"/rollouts/t{CHAT}", json=ASK)).json()["id"]
    lose(rig, ledger)
    await lost(rig, "t", seed=1)
    assert [turn.response_id for turn in await ledger.submit("t")] == [kept]
    assert await ledger.deliveries() == [("t", "delivered"), ("t", "superseded")]


@pytest.mark.parametrize("there", [True, False])
async def test_a_client_that_goes_before_the_last_piece_has_not_had_it(there: bool) -> None:
    """A large reply is sent in pieces, and the server tells of a client that went only when it is asked."""
    sent: list[int] = []
    ended: list[bool] = []

    async def receive() -> dict[str, Any]:
        if there or len(sent) < 2:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))

    scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
    await Whole(Request(scope, receive), b"x" * 150_000, ended.append)(scope, receive, send)
    assert sent == [0, 65536, 65536, 18928] and ended == [there]


async def test_a_stream_that_broke_is_superseded(rig: Rig, ledger: Ledgered, scripted: FakeEngine) -> None:
    scripted.abort = [2]
    told = await rig.http.post(f"/rollouts/t{CHAT}", json=ASK | {"stream": True})
    assert "send it again" in told.text
    await until(lambda: [exchange for exchange in ledger.of(w.Exchange) if exchange.part])
    scripted.abort = None
    await rig.http.post(f"/rollouts/t{CHAT}", json=ASK | {"stream": True}, headers=AGAIN)
    assert await ledger.deliveries() == [("t", "superseded"), ("t", "delivered")]
    (turn,) = await ledger.submit("t")
    assert text_of(turn.token_ids) == "Paris$"


async def test_equal_requests_whose_replies_came_are_further_samples(rig: Rig, ledger: Ledgered) -> None:
    told = await asyncio.gather(*(rig.http.post(f"/rollouts/t{CHAT}", json=ASK) for _ in range(3)))
    again = await rig.http.post(f"/rollouts/t{CHAT}", json=ASK, headers=AGAIN)  # the SDK's, of a request that failed
    ids = [one.json()["id"] for one in (*told, again)]
    assert len(set(ids)) == 4 and await ledger.deliveries() == [("t", "delivered")] * 4
    assert sorted(turn.response_id for turn in await ledger.submit("t")) == sorted(ids)


async def test_a_reply_is_found_again_after_the_gateway_died(rig: Rig, ledger: Ledgered, scripted: FakeEngine) -> None:
    ledger.deaf = True  # killed before it told how the reply ended
    first = (await rig.http.post(f"/rollouts/t{CHAT}", json=ASK)).json()
    await ledger.settle()
    await rig.start(spawn=1)
    await ledger.route(merged(scripted, 3, 4))
    ledger.deaf = False
    assert await ledger.deliveries() == [("t", "pending")]
    again = (await rig.http.post(f"/rollouts/t{CHAT}", json=ASK, headers=AGAIN)).json()
    assert again["id"] == first["id"] and await ledger.deliveries() == [("t", "delivered")]
    assert len(await ledger.submit("t")) == 1


async def test_a_reply_in_doubt_is_trained_unless_it_is_asked_again(
    rig: Rig, ledger: Ledgered, scripted: FakeEngine
) -> None:
    ledger.deaf = True
    for seed in (1, 2):
        await rig.http.post(f"/rollouts/t{CHAT}", json=ASK | {"seed": seed})
    await ledger.settle()
    await rig.start(spawn=1)
    await ledger.route(merged(scripted, 3, 4))
    await rig.http.post(f"/rollouts/t{CHAT}", json=ASK | {"seed": 2})
    assert [delivery for _, delivery in await ledger.deliveries()] == ["pending", "superseded", "pending"]
    assert [turn.sampling.seed for turn in await ledger.submit("t")] == [1, 2]


async def test_what_the_daemon_was_too_slow_to_confirm_is_given_to_who_asks_again(
    rig: Rig, ledger: Ledgered, scripted: FakeEngine
) -> None:
    await rig.start(replace(LIMITS, ledger_s=0.1))
    await ledger.route(merged(scripted, 3, 4))
    late = asyncio.Event()

    async def committed(exchange: w.Exchange) -> None:
        await late.wait()

    ledger.committed = committed
    told = await rig.http.post(f"/rollouts/t{CHAT}", json=ASK)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "ledger_timeout")
    ledger.committed = None
    late.set()
    await until(lambda: ledger.of(Delivery))
    assert (await rig.http.post(f"/rollouts/t{CHAT}", json=ASK, headers=AGAIN)).status_code == 200
    assert await ledger.deliveries() == [("t", "delivered")] and len(scripted.bodies("/generate")) == 1


# ---- closed rollouts -----------------------------------------------------------------------------------------------------


async def test_a_closed_rollout_takes_no_more_responses(rig: Rig, ledger: Ledgered) -> None:
    with pytest.raises(NotFound, match="no rollout 't'"):
        await ledger.submit("t")
    await rig.http.post(f"/rollouts/t{CHAT}", json=ASK)
    await ledger.submit("t")
    told = await rig.http.post(f"/rollouts/t{CHAT}", json=ASK)
    assert (told.status_code, told.json()["error"]["code"]) == (410, "rollout_closed")
    assert "rollout 't' is trajectory 1 already" in told.json()["error"]["message"]
    assert len(await ledger.submit("t")) == 1, "the same submission counts once"
    with pytest.raises(Conflict, match="is trajectory 1 already"):
        await ledger.submit("t", key="other")
