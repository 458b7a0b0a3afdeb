"""Responses that a push came across: who sampled each token, and whose cache it was, told by the engine's worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from artd_schema.data.trajectory import Turn
from artd_schema.wire import worker as w
from tests.awake import SOON_S, until
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import Rig, lora, merged
from tests.gateway.test_older_engine import as_025

pytestmark = pytest.mark.asyncio

KEPT = {"policy": [[0, "pol@3"], [4, "pol@4"]], "cache": [[0, "pol@3"], [3, "pol@4"]]}
RECOMPUTED = {"policy": [[0, "pol@3"], [4, "pol@4"]], "cache": [[0, "pol@4"]]}
OLD, NEW = ({"policy": [[0, name]], "cache": [[0, name]]} for name in ("pol@3", "pol@4"))


@pytest.fixture
def older(engine: FakeEngine) -> FakeEngine:
    """Its replies say nothing of weights."""
    engine.edit = as_025
    return engine


async def held(rig: Rig) -> None:
    await rig.daemon.say(w.Hold(push=1, fence=1, engine="e0"))


async def across(rig: Rig, engine: FakeEngine, **asked: Any) -> httpx.Response:
    """A request that is in flight from before a push until after it."""
    engine.gate.clear()
    engine.entered.clear()
    request = asyncio.create_task(rig.chat(**asked))
    await engine.entered.wait()
    await held(rig)
    await rig.daemon.route(merged(engine, 4, 6))
    engine.gate.set()
    return await request


def turn(rig: Rig) -> Turn:
    return rig.daemon.ledger[-1][1][0]


def asked(engine: FakeEngine) -> list[list[str]]:
    return [b["kwargs"]["choices"] for b in engine.bodies("/collective_rpc") if b["method"] == "artd_take_sampled"]


@pytest.mark.parametrize(
    ("told", "policy", "cache", "model"),
    [
        (KEPT, ((0, 4), (4, 6)), ((0, 4), (3, 6)), "pol@4"),
        (RECOMPUTED, ((0, 4), (4, 6)), ((0, 6),), "pol@4"),
        (OLD, ((0, 4),), ((0, 4),), "pol@3"),
        (NEW, ((0, 6),), ((0, 6),), "pol@4"),
        (
            {"policy": [[0, "pol@3"], [6, "pol@4"]], "cache": [[0, "pol@3"], [5, "pol@4"]]},
            ((0, 4),),
            ((0, 4),),
            "pol@3",
        ),
    ],
    ids=["kept", "recomputed", "ended before", "sent before, begun after", "went on behind its last token"],
)
async def test_epochs_break_where_the_worker_saw_the_push(
    rig: Rig, older: FakeEngine, told: Any, policy: Any, cache: Any, model: str
) -> None:
    older.sampled = [told]
    body = (await across(rig, older)).json()
    assert (turn(rig).policy_epoch, turn(rig).kv_cache_epoch) == (policy, cache)
    assert body["model"] == rig.daemon.ledger[-1][0].model == model
    assert asked(older) == [[older.bodies("/generate")[0]["request_id"] + "#0"]]


async def test_every_choice_has_its_own(rig: Rig, older: FakeEngine) -> None:
    older.texts, older.sampled = ["Paris$", "Lyon$"], [OLD, KEPT]
    assert (await across(rig, older, n=2)).status_code == 200
    found = [(one.policy_epoch, one.kv_cache_epoch) for one in rig.daemon.ledger[-1][1]]
    assert found == [(((0, 4),), ((0, 4),)), (((0, 4), (4, 6)), ((0, 4), (3, 6)))]


async def test_a_response_that_ends_under_the_hold_is_asked_for_too(rig: Rig, older: FakeEngine) -> None:
    """The push may be over, and its route still on its way."""
    await rig.limits(label_s=SOON_S)
    await rig.daemon.route(merged(older, 3, 4))
    older.gate.clear()
    request = asyncio.create_task(rig.chat())
    await older.entered.wait()
    await held(rig)
    older.sampled = [NEW]
    older.gate.set()
    await asyncio.sleep(0.05)
    assert not request.done(), "pol@4 has no name yet"
    await rig.daemon.route(merged(older, 4, 6))
    assert (await request).status_code == 200 and turn(rig).policy_epoch == ((0, 6),)


async def test_nobody_is_asked_where_no_push_came_across(rig: Rig, older: FakeEngine) -> None:
    await rig.chat()
    await held(rig)
    await rig.daemon.route(merged(older, 4, 6))
    await rig.chat()
    assert asked(older) == []
    assert [turns[0].policy_epoch for _, turns in rig.daemon.ledger] == [((0, 4),), ((0, 6),)]


async def test_of_an_engine_that_stamps_its_replies_only_the_cache_is_asked(rig: Rig, engine: FakeEngine) -> None:
    engine.sampled = [RECOMPUTED | {"policy": [[0, "pol@3"], [5, "pol@4"]]}]
    engine.versions = [("pol@3", 0.5), ("pol@4", 1.0)]
    assert (await across(rig, engine)).status_code == 200
    assert (turn(rig).policy_epoch, turn(rig).kv_cache_epoch) == (((0, 4), (3, 6)), ((0, 6),))
    engine.versions = [("pol@4", 1.0)]
    assert (await across(rig, engine)).status_code == 200
    assert len(asked(engine)) == 1 and turn(rig).kv_cache_epoch == ((0, 6),)


async def test_in_lora_mode_nobody_is_asked(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.daemon.route(lora(engine, (1, 2)))
    engine.edit = as_025
    engine.gate.clear()
    request = asyncio.create_task(rig.chat())
    await engine.entered.wait()
    await rig.daemon.route(lora(engine, (1, 2), (2, 5)))
    engine.gate.set()
    assert (await request).status_code == 200
    assert asked(engine) == [] and turn(rig).policy_epoch == turn(rig).kv_cache_epoch == ((0, 2),)


def forgets(engine: FakeEngine) -> None:
    engine.sampled = [None]


def is_gone(engine: FakeEngine) -> None:
    engine.fail["/collective_rpc"] = (500, {"error": {"message": "no such method"}})


def answers_nonsense(engine: FakeEngine) -> None:
    engine.fail["/collective_rpc"] = (200, {"results": [{"x": {"policy": 7}}]})


@pytest.mark.parametrize("fails", [forgets, is_gone, answers_nonsense])
async def test_what_nobody_knows_is_not_trained_on_and_never_guessed(
    rig: Rig, older: FakeEngine, fails: Callable[[FakeEngine], None]
) -> None:
    fails(older)
    response = await across(rig, older)
    assert response.status_code == 502
    assert "which weights sampled" in response.json()["error"]["message"] and rig.daemon.ledger == []
    await rig.daemon.route(merged(older, 3, 4))
    response = await across(rig, older, headers={"x-artd-split": "eval"})
    assert response.status_code == 200
    assert (turn(rig).policy_epoch, turn(rig).kv_cache_epoch) == ((), ())


async def test_a_pinned_request_needs_to_be_known(rig: Rig, older: FakeEngine) -> None:
    for told, status in (([OLD], 200), ([KEPT], 503), ([None], 503)):
        await rig.daemon.route(merged(older, 3, 4))
        older.sampled = told
        response = await across(rig, older, model="pol@3", headers={"x-artd-split": "eval"})
        assert response.status_code == status, response.text


@pytest.mark.parametrize("runs", [[], [[1, "pol@3"]], [[0, "pol@3"], [0, "pol@4"]], [[0, "pol@3"], [4, "x"], [2, "y"]]])
@pytest.mark.parametrize("which", ["policy", "cache"])
async def test_runs_that_do_not_cover_the_tokens_are_a_502(rig: Rig, older: FakeEngine, which: str, runs: Any) -> None:
    older.sampled = [KEPT | {which: runs}]
    response = await across(rig, older)
    assert (response.status_code, rig.daemon.ledger) == (502, [])


async def test_weights_that_no_route_names_are_never_recorded(rig: Rig, older: FakeEngine) -> None:
    older.sampled = [{"policy": [[0, "pol@3"], [4, "pol@9"]], "cache": [[0, "pol@3"]]}]
    response = await across(rig, older)
    assert response.status_code == 502 and "pol@9" in response.json()["error"]["message"]
    assert rig.daemon.ledger == []


async def test_new_requests_get_a_salt_that_no_kept_one_has(rig: Rig, older: FakeEngine) -> None:
    """A request that goes on fills blocks under its own epoch's salt, of the old weights and of the new."""
    older.sampled = [KEPT]
    await across(rig, older)
    await rig.chat()
    assert [body["cache_salt"] for body in older.bodies("/generate")] == ["4:", "6:"]


async def test_a_request_that_a_hold_met_on_its_way_in_has_the_new_salt(rig: Rig, older: FakeEngine) -> None:
    """It was placed and rendered for the old weights, and is admitted after the push."""

    async def slow(request: Any, body: Any) -> Any:
        await held(rig)
        return await older._render_chat(request, body)

    older.replace("/v1/chat/completions/render", slow)
    request = asyncio.create_task(rig.chat())
    await until(lambda: older.bodies("/render"))
    await asyncio.sleep(0.05)
    assert older.bodies("/generate") == []
    await rig.daemon.route(merged(older, 4, 6))
    assert (await request).status_code == 200
    assert [body["cache_salt"] for body in older.bodies("/generate")] == ["6:"]
    assert turn(rig).policy_epoch == ((0, 6),) and asked(older) == []
