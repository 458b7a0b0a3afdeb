"""Names, holds, admission and in-flight counts."""

from __future__ import annotations

import asyncio

import pytest

from artd_schema.wire import worker as w
from tests.awake import SOON_S, until
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import Rig, lora, merged, served

pytestmark = pytest.mark.asyncio


async def hold(rig: Rig, engine: str = "e0", push: int = 7) -> w.Held:
    await rig.daemon.say(w.Hold(push=push, fence=1, engine=engine))
    held = rig.daemon.of(w.Held)[-1]
    assert (held.push, held.fence, held.engine) == (push, 1, engine)
    return held


async def test_a_route_is_confirmed(rig: Rig) -> None:
    await rig.daemon.route()
    await rig.daemon.route()
    assert [taken.seq for taken in rig.daemon.of(w.RouteTaken)] == [1, 2]


async def test_an_older_route_changes_nothing(rig: Rig, engine: FakeEngine) -> None:
    await rig.daemon.say(w.Route(seq=0, runs=(), engines=()))
    assert rig.daemon.of(w.RouteTaken)[-1].seq == 1
    assert (await rig.chat()).status_code == 200


async def test_an_unknown_model_is_a_404_that_lists_the_known_names(rig: Rig, engine: FakeEngine) -> None:
    for name in ("other", "other@3", "pol@3@1"):
        response = await rig.chat(model=name)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert "pol, pol@3" in response.json()["error"]["message"]


async def test_merged_serves_only_the_newest_step(rig: Rig, engine: FakeEngine) -> None:
    await rig.daemon.route(merged(engine, 4, 6))
    response = await rig.chat(model="pol@3")
    assert response.status_code == 404
    assert "pol, pol@4" in response.json()["error"]["message"]
    assert (await rig.chat(model="pol@4")).json()["model"] == "pol@4"


async def test_models_lists_runs_and_their_live_steps(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.daemon.route(lora(engine, (1, 2), (2, 5)), runs=("pol", "new"))
    body = (await rig.http.get("/v1/models")).json()
    assert [model["id"] for model in body["data"]] == ["pol", "pol@2", "pol@1", "new"]
    assert body["data"][0]["max_model_len"] == 100
    assert (await rig.http.get("/v1/models/pol@1")).json()["id"] == "pol@1"
    assert (await rig.http.get("/v1/models/pol@7")).status_code == 404


async def test_the_newest_step_is_the_one_of_the_highest_epoch(rig: Rig) -> None:
    """After a rollback the newest lineage's step is lower than one that an engine may still serve."""
    old, new = await rig.engine("old"), await rig.engine("new")
    await rig.daemon.route(merged(old, 9, 9, name="old"), merged(new, 8, 10, name="new"))
    assert (await rig.chat()).json()["model"] == "pol@8"


async def test_requests_go_to_the_engine_with_the_fewest_in_flight(rig: Rig) -> None:
    engines = [await rig.engine(name) for name in ("e0", "e1")]
    await rig.daemon.route(*(merged(e, 3, 4, name=n) for e, n in zip(engines, ("e0", "e1"), strict=True)))
    for engine in engines:
        engine.gate.clear()
    requests = []
    for _ in range(4):
        requests.append(asyncio.create_task(rig.chat()))
        await until(lambda: sum(len(e.bodies("/generate")) for e in engines) == len(requests))
    assert [len(engine.bodies("/generate")) for engine in engines] == [2, 2]
    for engine in engines:
        engine.gate.set()
    assert {response.status_code for response in await asyncio.gather(*requests)} == {200}


async def test_a_run_that_serves_nothing_is_waited_for(rig: Rig) -> None:
    await rig.limits(ready_s=SOON_S)
    await rig.daemon.route()
    request = asyncio.create_task(rig.chat())
    await asyncio.sleep(0.1)
    assert not request.done()
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 0, 0))
    assert (await request).json()["model"] == "pol@0"


async def test_a_run_that_serves_nothing_for_too_long_is_a_503_with_retry_after(rig: Rig) -> None:
    await rig.daemon.route()
    response = await rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert int(response.headers["retry-after"]) >= 1


# ---- hold -----------------------------------------------------------------------------------------------------------


async def test_hold_is_answered_with_the_requests_in_flight(rig: Rig, engine: FakeEngine) -> None:
    engine.gate.clear()
    requests = [asyncio.create_task(rig.chat()) for _ in range(3)]
    await until(lambda: len(engine.bodies("/generate")) == 3)
    assert (await hold(rig)).in_flight == 3
    engine.gate.set()
    assert {response.status_code for response in await asyncio.gather(*requests)} == {200}
    assert (await hold(rig, push=8)).in_flight == 0


async def test_nothing_enters_a_held_engine_until_a_newer_route(rig: Rig, engine: FakeEngine) -> None:
    assert (await hold(rig)).in_flight == 0
    requests = [asyncio.create_task(rig.chat()) for _ in range(3)]
    await asyncio.sleep(0.3)
    assert engine.bodies("/generate") == []
    assert not any(request.done() for request in requests)
    await rig.daemon.route(merged(engine, 4, 6))
    assert {response.json()["model"] for response in await asyncio.gather(*requests)} == {"pol@4"}


async def test_a_hold_that_comes_while_a_prompt_is_rendered_stops_the_request(rig: Rig, engine: FakeEngine) -> None:
    render = engine._render_chat

    async def slow(request: object, body: dict[str, object]) -> object:
        await hold(rig)
        return await render(request, body)

    engine.replace("/v1/chat/completions/render", slow)
    request = asyncio.create_task(rig.chat())
    await until(lambda: rig.daemon.of(w.Held))
    await asyncio.sleep(0.2)
    assert engine.bodies("/render")
    assert engine.bodies("/generate") == []
    await rig.daemon.route(merged(engine, 4, 6))
    assert (await request).json()["model"] == "pol@4"
    assert len(engine.bodies("/render")) == 1


async def test_a_route_may_hold_an_engine(rig: Rig, engine: FakeEngine) -> None:
    await rig.daemon.route(merged(engine, 3, 4, hold=True))
    request = asyncio.create_task(rig.chat())
    await asyncio.sleep(0.1)
    assert engine.calls == []
    await rig.daemon.route(merged(engine, 3, 4))
    assert (await request).status_code == 200


async def test_a_held_engine_leaves_the_others_open(rig: Rig) -> None:
    one, two = await rig.engine("e0"), await rig.engine("e1")
    await rig.daemon.route(merged(one, 4, 6), merged(two, 3, 4, name="e1"))
    await hold(rig)
    assert (await rig.chat()).json()["model"] == "pol@3"
    assert one.calls == []


async def test_a_hold_without_end_is_a_503(rig: Rig) -> None:
    await rig.limits(hold_s=0.2)
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    await hold(rig)
    response = await rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert "held" in response.json()["error"]["message"]


async def test_a_request_for_a_replaced_step_that_waited_in_a_hold_is_a_404(rig: Rig, engine: FakeEngine) -> None:
    await hold(rig)
    request = asyncio.create_task(rig.chat(model="pol@3"))
    await asyncio.sleep(0.1)
    await rig.daemon.route(merged(engine, 4, 6))
    response = await request
    assert response.status_code == 404
    assert "pol@4" in response.json()["error"]["message"]


async def test_a_client_that_goes_away_aborts_the_engines_request(rig: Rig, engine: FakeEngine) -> None:
    engine.gate.clear()
    request = asyncio.create_task(rig.chat())
    await engine.entered.wait()
    request.cancel()
    await until(lambda: engine.cancelled)
    assert (await hold(rig)).in_flight == 0
    assert rig.daemon.ledger == []


async def test_draining_ends_what_waits_and_admits_nothing(rig: Rig, engine: FakeEngine) -> None:
    await hold(rig)
    request = asyncio.create_task(rig.chat())
    await asyncio.sleep(0.1)
    await rig.daemon.say(w.Exit(grace_s=3.0))
    assert (await request).json()["error"]["code"] == "draining"
    assert (await rig.chat()).status_code == 503
    assert rig.daemon.stopped == [3.0]


async def test_two_runs_do_not_mix(rig: Rig, engine: FakeEngine) -> None:
    other = await rig.engine("other")
    route = w.EngineRoute(engine="o", socket=other.socket, mode="merged", base_model="tiny", max_model_len=100,
                          served=(served(1, 9, "new"),))  # fmt: skip
    await rig.daemon.route(merged(engine, 3, 4), route, runs=("pol", "new"))
    assert (await rig.chat()).json()["model"] == "pol@3"
    assert (await rig.chat(model="new")).json()["model"] == "new@1"
