"""Names, holds, admission and in-flight counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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


# ---- several engines of a run ---------------------------------------------------------------------------------------


async def fleet(rig: Rig, count: int = 2, epoch: int = 4) -> list[FakeEngine]:
    """Engines that serve the same; the newest table is theirs."""
    engines = [await rig.engine(f"e{number}", max_model_len=10_000) for number in range(count)]
    await rig.daemon.route(*(merged(e, 3, epoch, name=f"e{n}") for n, e in enumerate(engines)))
    return engines


def asked(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.bodies("/generate")) for engine in engines]


async def start(rig: Rig, engines: list[FakeEngine], texts: Sequence[str]) -> list[int]:
    """Ask beside each other, in this order. Returns which engine each request is in; then all are answered."""
    for engine in engines:
        engine.gate.clear()
    requests, places = [], []
    for text in texts:
        before = asked(engines)
        requests.append(asyncio.create_task(rig.chat(messages=[{"role": "user", "content": text}])))
        await until(lambda before=before: asked(engines) != before)
        places.append(next(n for n, count in enumerate(asked(engines)) if count != before[n]))
    for engine in engines:
        engine.gate.set()
    assert {response.status_code for response in await asyncio.gather(*requests)} == {200}
    return places


async def test_new_rollouts_spread_and_their_turns_stay_where_the_prefix_is(rig: Rig) -> None:
    engines = await fleet(rig, 3)
    texts = [name * 300 for name in "abc"]
    homes = await start(rig, engines, texts)
    assert sorted(homes) == [0, 1, 2]
    for text, home in zip(texts, homes, strict=True):
        before = asked(engines)
        turns = [("user", text), ("assistant", "Paris"), ("user", "and then?")]
        for _ in range(2):
            await rig.chat(messages=[{"role": role, "content": content} for role, content in turns])
        assert asked(engines)[home] == before[home] + 2


async def test_a_rollout_goes_on_elsewhere_when_its_engine_is_held_or_gone(rig: Rig) -> None:
    engines = await fleet(rig)
    home = (await start(rig, engines, ["a" * 300]))[0]
    await hold(rig, f"e{home}")
    await start(rig, engines, ["a" * 300])
    assert asked(engines)[1 - home] == 1
    other = engines[1 - home]
    await rig.daemon.route(merged(other, 3, 4, name=f"e{1 - home}"))
    await start(rig, engines, ["a" * 300])
    assert asked(engines)[1 - home] == 2


@pytest.mark.parametrize("path", ["/render", "/generate"])
async def test_a_request_that_an_engine_fails_goes_to_another_one_at_once(rig: Rig, path: str) -> None:
    """The daemon has not noticed yet, and the table is still the same."""
    engines = await fleet(rig)
    engines[0].fail[path] = (500, {"error": {"message": "it fell"}})
    responses = [await rig.chat() for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert engines[0].bodies(path), "the failing engine was not asked"


async def test_a_request_that_the_only_engine_fails_waits_for_a_newer_table(rig: Rig, engine: FakeEngine) -> None:
    engine.fail["/generate"] = (500, {"error": {"message": "it fell"}})
    assert (await rig.chat()).status_code == 502
    assert len(engine.bodies("/generate")) == 1
