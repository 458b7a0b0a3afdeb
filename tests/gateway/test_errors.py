"""Bad requests and failing engines: every one has a clear error of the same form."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from artd_schema.wire import worker as w
from artd_workers.engines.vllm.dialect import DIALECT
from artd_workers.gateway.errors import EngineFailure
from artd_workers.gateway.request.flow import Flow
from tests.awake import SOON_S
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import Rig, merged

pytestmark = pytest.mark.asyncio


def error(response: httpx.Response, status: int, code: str) -> str:
    """The message of an error reply of this status and code."""
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert set(body) == {"message", "type", "code", "param"}
    assert body["code"] == code
    return body["message"]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic abc"}])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nowhere"])
async def test_every_path_needs_the_token(rig: Rig, engine: FakeEngine, headers: dict[str, str], path: str) -> None:
    async with httpx.AsyncClient(base_url=rig.url, headers=headers, trust_env=False) as http:
        response = await http.request("POST" if "chat" in path else "GET", path)
    code = "invalid_api_key" if headers else "missing_api_key"
    assert "run.api_key" in error(response, 401, code) or "Basic" in response.text
    assert response.json()["error"]["type"] == "authentication_error"
    assert engine.calls == []


async def test_a_missing_model_is_named(rig: Rig, engine: FakeEngine) -> None:
    assert "`model`" in error(await rig.chat(model=None), 400, "model_missing")


async def test_echo_is_refused(rig: Rig, engine: FakeEngine) -> None:
    error(await rig.complete(echo=True), 400, "invalid_request")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_a_400(rig: Rig, engine: FakeEngine, content: bytes) -> None:
    error(await rig.http.post("/v1/chat/completions", content=content), 400, "invalid_json")


async def test_a_body_over_the_limit_is_a_413_that_names_both_sizes(rig: Rig) -> None:
    await rig.limits(body=1000)
    message = error(await rig.http.post("/v1/completions", content=b"x" * 2000), 413, "body_too_large")
    assert "2000" in message
    assert "1000" in message

    async def chunks() -> object:
        for _ in range(20):
            yield b"x" * 100

    error(await rig.http.post("/v1/completions", content=chunks()), 413, "body_too_large")


async def test_unknown_paths_and_methods(rig: Rig) -> None:
    assert "/v1/models" in error(await rig.http.get("/v1/embeddings"), 404, "unknown_path")
    error(await rig.http.get("/v1/chat/completions"), 405, "method_not_allowed")


async def test_a_prompt_over_the_context_length_is_a_400(rig: Rig, engine: FakeEngine) -> None:
    assert "context length" in error(await rig.complete(prompt="x" * 101), 400, "context_length_exceeded")
    assert "context length" in error(await rig.complete(prompt="x" * 100), 400, "context_length_exceeded")
    assert "context length" in error(await rig.complete(max_tokens=101), 400, "context_length_exceeded")
    assert engine.bodies("/generate") == []
    assert (await rig.complete(prompt="x" * 99)).status_code == 200


async def test_the_engines_400_is_passed_on(rig: Rig, engine: FakeEngine) -> None:
    engine.fail["/generate"] = (400, {"error": {"message": "sampling_params.n must be at most 4", "param": "n"}})
    response = await rig.chat(n=9)
    assert error(response, 400, "invalid_request") == "sampling_params.n must be at most 4"
    assert response.json()["error"]["param"] == "n"


async def test_an_engine_without_its_routes_is_named(rig: Rig, engine: FakeEngine) -> None:
    engine.fail["/render"] = (403, {"error": "Forbidden"})
    assert "--enable-scale-out" in error(await rig.chat(), 502, "engine_failed")


@pytest.mark.parametrize("step", ["/render", "/generate", "/derender"])
async def test_an_engines_500_is_a_502_that_names_the_engine(rig: Rig, engine: FakeEngine, step: str) -> None:
    engine.fail[step] = (500, {"error": {"message": "EngineCore is dead", "type": "x", "code": 500}})
    message = error(await rig.chat(), 502, "engine_failed")
    assert "engine e0" in message
    assert "EngineCore is dead" in message
    assert (await in_flight(rig)) == 0


async def test_a_reply_that_is_no_json_is_a_502(rig: Rig, engine: FakeEngine) -> None:
    from starlette.responses import PlainTextResponse

    engine.fail["/generate"] = (200, PlainTextResponse("{nope"))
    assert "no JSON" in error(await rig.chat(), 502, "engine_failed")


async def test_a_failed_generation_ends_the_others_and_leaves_no_cancel_request() -> None:
    """With one left, the asyncio.timeout of Python 3.11.2 raises CancelledError: a 500 instead of the 502."""
    ended = []

    class Client:
        dialect = DIALECT

        async def post(self, path: str, body: dict[str, int], unbounded: bool) -> None:
            try:
                await asyncio.sleep(0.01 if body["n"] == 1 else 60)
                raise EngineFailure("e0", "no")
            finally:
                ended.append(body["n"])

    flow = Flow(None, None, None, None, None)
    with pytest.raises(EngineFailure):
        await flow._gather(Client(), [{"n": 0}, {"n": 1}])
    assert asyncio.current_task().cancelling() == 0
    assert ended == [1, 0]


async def in_flight(rig: Rig) -> int:
    await rig.daemon.say(w.Hold(push=1, fence=1, engine="e0"))
    return rig.daemon.of(w.Held)[-1].in_flight


async def test_an_engine_that_dies_during_a_request_is_a_502(rig: Rig, engine: FakeEngine) -> None:
    engine.gate.clear()
    request = asyncio.create_task(rig.chat())
    await engine.entered.wait()
    engine.server.cut()
    message = error(await request, 502, "engine_failed")
    assert "engine e0" in message
    assert "broke off" in message
    assert rig.daemon.ledger == []
    assert (await in_flight(rig)) == 0


async def test_an_engine_that_does_not_listen_is_a_502(rig: Rig, engine: FakeEngine) -> None:
    route = w.EngineRoute(engine="e7", socket=engine.socket + "-gone", mode="merged", base_model="tiny",
                          max_model_len=100, served=(w.Served(name="pol@5", run="pol", step=5, epoch=9),))  # fmt: skip
    await rig.daemon.route(route)
    assert "engine e7" in error(await rig.chat(), 502, "engine_failed")


async def test_a_request_whose_engine_died_is_made_again_when_a_newer_route_comes(rig: Rig) -> None:
    await rig.limits(retry_s=SOON_S)
    first, second = await rig.engine("e0"), await rig.engine("e1")
    await rig.daemon.route(merged(first, 3, 4))
    first.gate.clear()
    request = asyncio.create_task(rig.chat())
    await first.entered.wait()
    first.server.cut()
    await asyncio.sleep(0.1)
    assert not request.done()
    await rig.daemon.route(merged(second, 3, 4, name="e1"))
    response = await request
    assert response.status_code == 200
    ids = {call["request_id"] for call in first.bodies("/generate") + second.bodies("/generate")}
    assert len(ids) == 2


async def test_a_request_is_made_again_once_only(rig: Rig) -> None:
    await rig.limits(retry_s=SOON_S)
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    engine.fail["/generate"] = (500, {"error": {"message": "dead"}})
    request = asyncio.create_task(rig.chat())
    while not request.done():
        assert len(engine.bodies("/generate")) <= 2
        await asyncio.sleep(0.05)
        await rig.daemon.route(merged(engine, 3, 4))
    error(await request, 502, "engine_failed")
    assert len(engine.bodies("/generate")) == 2


async def test_tokens_that_came_out_are_never_generated_again(rig: Rig) -> None:
    await rig.limits(retry_s=1.0)
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    engine.fail["/derender"] = (500, {"error": {"message": "dead"}})
    request = asyncio.create_task(rig.chat())
    await engine.entered.wait()
    await rig.daemon.route(merged(engine, 3, 4))
    error(await request, 502, "engine_failed")
    assert len(engine.bodies("/generate")) == 1


# ---- requests that a push aborts ----------------------------------------------------------------------------------------


async def test_a_request_aborted_before_its_first_token_waits_for_the_push_and_runs_again(
    rig: Rig, engine: FakeEngine
) -> None:
    engine.gate.clear()
    request = asyncio.create_task(rig.chat(n=2))
    await engine.entered.wait()
    assert (await in_flight(rig)) == 1
    aborted = asyncio.Event()
    engine.abort, engine.edit = [0, 0], lambda _: aborted.set()
    engine.gate.set()
    await aborted.wait()
    await asyncio.sleep(0.2)
    assert not request.done()
    engine.abort = None
    await rig.daemon.route(merged(engine, 4, 6))
    assert (await request).json()["model"] == "pol@4"


async def test_a_request_aborted_after_its_first_token_is_a_503(rig: Rig, engine: FakeEngine) -> None:
    engine.abort = [0, 2]
    response = await rig.chat(n=2)
    assert "send it again" in error(response, 503, "aborted")
    assert response.headers["retry-after"]
    assert rig.daemon.ledger == []
    assert (await in_flight(rig)) == 0


async def test_a_prompt_that_an_engine_with_more_room_rendered_is_measured_by_the_route(rig: Rig) -> None:
    engine = await rig.engine(max_model_len=200)
    narrow = merged(engine, 3, 4)
    await rig.daemon.route(w.EngineRoute(engine="e0", socket=engine.socket, mode="merged", base_model="tiny",
                                         max_model_len=100, served=narrow.served))  # fmt: skip
    message = error(await rig.complete(prompt="x" * 100), 400, "context_length_exceeded")
    assert "100 tokens" in message
    assert "context length is 100" in message


async def test_an_announced_body_over_the_limit_is_refused_before_it_is_sent(rig: Rig) -> None:
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {rig.bearer}\r\ncontent-length: 50000000\r\n\r\n"
    )
    writer.write(head.encode())
    async with asyncio.timeout(SOON_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()
