"""Routed experts from engine to ledger: whole and checked, or the response is refused; what is not taken is dropped."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio

from artd_schema.data.trajectory import RouteShape, Turn
from artd_schema.wire import worker as w
from artd_workers.engines.vllm import dialect
from artd_workers.gateway.engine import client as engine_module
from artd_workers.gateway.engine import experts
from artd_workers.gateway.request import deliver
from tests.awake import SOON_S, until
from tests.fakes.routes import SHAPE, WIDE, layer_rows, put, rows_of
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import Rig, lora, merged

pytestmark = pytest.mark.asyncio
PROMPT = len("<user>Capital?<assistant>")
RPC = "/collective_rpc"


@pytest_asyncio.fixture
async def engine(rig: Rig) -> FakeEngine:
    """One merged engine of a mixture of experts that serves pol@3 under epoch 4."""
    return await moe(rig)


async def moe(rig: Rig, shape: RouteShape = SHAPE) -> FakeEngine:
    engine = await rig.engine()
    engine.routes = shape
    await rig.daemon.route(merged(engine, 3, 4))
    return engine


def the_turn(rig: Rig) -> Turn:
    _, (turn,) = rig.daemon.ledger[0]
    return turn


def refused(rig: Rig, response: httpx.Response, *words: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed"), response.text
    message = response.json()["error"]["message"]
    for word in (*words, "engine e0"):
        assert word in message, message
    assert rig.daemon.ledger == []


# ---- taken --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
async def test_the_ledger_has_the_routes_of_prompt_and_sampled_tokens(rig: Rig, shape: RouteShape) -> None:
    engine = await moe(rig, shape)
    assert (await rig.chat()).status_code == 200
    turn = the_turn(rig)
    assert (turn.routes, turn.routes_start) == (rows_of(shape, 0, PROMPT + 5), 0)
    assert engine.captured == {}


async def test_routes_are_asked_for_once_by_the_request_ids_between_generate_and_derender(
    rig: Rig, engine: FakeEngine
) -> None:
    await rig.complete(prompt=["a", "bc"], n=2)
    paths = [path.rpartition("/")[2] for path, _ in engine.calls]
    assert paths == ["render", "generate", "generate", "collective_rpc", "derender"]
    (asked,) = engine.bodies(RPC)
    assert asked["method"] == "artd_take_routes" and asked["args"] == [] and asked["timeout"] > 0
    assert asked["kwargs"] == {"request_ids": [body["request_id"] for body in engine.bodies("/generate")]}


async def test_every_choice_has_its_own(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["Paris$", "Lyon$", "Nice, or so$"]
    assert (await rig.chat(n=3)).status_code == 200
    _, turns = rig.daemon.ledger[0]
    sizes = [PROMPT + len(text) - 1 for text in engine.texts]
    assert [turn.routes for turn in turns] == [rows_of(SHAPE, 0, size, i) for i, size in enumerate(sizes)]


async def test_every_prompt_has_its_own(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["a$", "bcd$"]
    assert (await rig.complete(prompt=["first", "second!"], n=2)).status_code == 200
    _, turns = rig.daemon.ledger[0]
    sizes = [(6, 0), (8, 1), (8, 0), (10, 1)]
    assert [turn.routes for turn in turns] == [rows_of(SHAPE, 0, size, salt) for size, salt in sizes]


async def test_rows_may_reach_to_the_last_token_and_begin_within_the_prompt(rig: Rig, engine: FakeEngine) -> None:
    def whole(told: Any) -> None:
        told.update(routes=rows_of(SHAPE, 7, PROMPT + 6 - 7), rows=PROMPT + 6 - 7, start=7)

    engine.damage = whole
    assert (await rig.chat()).status_code == 200
    assert (the_turn(rig).routes, the_turn(rig).routes_start) == (rows_of(SHAPE, 7, PROMPT - 1), 7)


async def test_rows_after_a_stop_string_are_cut_off(rig: Rig, engine: FakeEngine) -> None:
    """The engine computes on until its API server has found the string in the text and says so."""
    engine.texts = ["abcSTOP"]
    size = PROMPT + 7
    further = {"routes": rows_of(SHAPE, 0, size + 4), "rows": size + 4}
    engine.damage = lambda told: told.update(further)
    refused(rig, await rig.chat(), f"{size + 4} rows from token 0")
    assert (await rig.chat(stop=["STOP"])).status_code == 200
    assert the_turn(rig).routes == rows_of(SHAPE, 0, size)


async def test_in_lora_mode_too(rig: Rig) -> None:
    engine = await rig.engine()
    engine.routes = SHAPE
    await rig.daemon.route(lora(engine, (1, 2)))
    assert (await rig.chat()).status_code == 200
    assert the_turn(rig).routes == rows_of(SHAPE, 0, PROMPT + 5)


async def test_many_routes_are_checked_away_from_the_event_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    check, threads = experts.captures_of, []

    def seen(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return check(*given)

    monkeypatch.setattr(experts, "captures_of", seen)
    engine = await moe(rig)
    assert (await rig.chat()).status_code == 200
    monkeypatch.setattr(experts, "_IN_THREAD", 1)
    assert (await rig.chat()).status_code == 200
    assert threads[0] is threading.current_thread() is not threads[1]
    assert the_turn(rig).routes == rows_of(SHAPE, 0, PROMPT + 5)
    engine.damage = lambda told: told.update(start=2)
    rig.daemon.ledger.clear()
    refused(rig, await rig.chat(), "rows from token 2")


async def test_large_replies_are_read_and_written_away_from_the_event_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, list[threading.Thread]] = {"read_taken": [], "encode_reply": []}

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given: (threads[name].append(threading.current_thread()), real(*given))[1]
        )

    watch(dialect, "read_taken")
    watch(deliver, "encode_reply")
    await moe(rig)
    small = (await rig.chat(return_token_ids=True, n=2)).json()
    for module in (engine_module, deliver):
        monkeypatch.setattr(module, "IN_THREAD", 100)
    large = (await rig.chat(return_token_ids=True, n=2)).json()
    for seen in threads.values():
        assert seen[0] is threading.current_thread() is not seen[1]
    assert [choice["message"] for choice in large["choices"]] == [choice["message"] for choice in small["choices"]]
    assert large.keys() == small.keys() and large["usage"] == small["usage"]


@pytest.mark.parametrize("large", [True, False])
async def test_an_unreadable_reply_is_a_502_however_large(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(engine_module, "IN_THREAD", 1 if large else 1 << 20)
    engine = await moe(rig)
    engine.damage = lambda told: told.update(rows="many")
    refused(rig, await rig.chat(), "another form")


async def test_a_dense_model_asks_for_nothing_and_its_engines_field_is_not_kept(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    engine.edit = lambda reply: reply["choices"][0].update(routed_experts="AAAA" * 1000)
    assert (await rig.chat(return_token_ids=True)).status_code == 200
    assert engine.bodies(RPC) == [] and the_turn(rig).routes == b""
    assert b"AAAA" not in the_turn(rig).raw and "AAAA" not in str(engine.bodies("/derender"))


# ---- refused ------------------------------------------------------------------------------------------------------------

N = PROMPT + 5
GOOD = rows_of(SHAPE, 0, N)
BAD = [
    ({"routes": GOOD[: -SHAPE.row_bytes], "rows": N - 1}, "29 rows from token 0 of 31"),
    ({"routes": rows_of(SHAPE, 0, N + 2), "rows": N + 2}, "rows from token 0"),
    ({"routes": GOOD[:-1]}, "for 30 rows of 6 bytes"),
    ({"routes": GOOD, "rows": N + 1}, "for 31 rows of 6 bytes"),
    ({"start": 2}, "30 rows from token 2"),
    ({"routes": GOOD[SHAPE.row_bytes :], "rows": N - 1}, "29 rows from token 0"),
    ({"start": -1}, "rows from token -1"),
    ({"routes": rows_of(SHAPE, PROMPT, 5), "rows": 5, "start": PROMPT}, "5 rows from token 25"),
    ({"routes": b"", "rows": 0}, "0 rows from token 0"),
    ({"routes": put(SHAPE, GOOD, 11, 2, 1, 8)}, "token 11: MoE layer 2: expert id 8, but there are 8"),
    ({"routes": put(SHAPE, GOOD, 4, 1, 0, GOOD[4 * 6 + 3])}, "token 4: MoE layer 1: expert ids"),
    ({"routes": bytes(len(GOOD))}, "captured nothing"),
    ({"rows": "many"}, "another form"),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
@pytest.mark.parametrize("split", ["train", "eval"])
async def test_routes_that_do_not_fit_are_a_502_and_never_recorded(
    rig: Rig, engine: FakeEngine, changes: dict[str, Any], words: str, split: str
) -> None:
    engine.damage = lambda told: told.update(changes)
    response = await rig.chat(headers={"x-artd-split": split})
    if split == "eval" and words == "another form":
        assert response.status_code == 200 and the_turn(rig).routes == b""
        return
    refused(rig, response, words)
    assert engine.bodies("/derender") == []


async def test_one_bad_choice_of_three_refuses_the_response_and_is_named(rig: Rig, engine: FakeEngine) -> None:
    def damage(told: Any) -> None:
        if told["routes"] == rows_of(SHAPE, 0, N, 1):
            told["routes"] = bytes([1, 1] * 3) * N

    engine.damage = damage
    refused(rig, await rig.chat(n=3), "-0#1", "token 0")


async def test_without_routes_a_response_is_good_for_eval_only(rig: Rig, engine: FakeEngine) -> None:
    engine.edit = lambda reply: engine.captured.clear()
    refused(rig, await rig.chat(), "no routed experts", "expert_replay=false")
    assert (await rig.chat(headers={"x-artd-split": "eval"})).status_code == 200
    assert the_turn(rig).routes == b""


async def test_eval_has_its_routes_where_the_engine_tells_them(rig: Rig, engine: FakeEngine) -> None:
    assert (await rig.chat(headers={"x-artd-split": "eval"})).status_code == 200
    assert the_turn(rig).routes == GOOD


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_engine_that_cannot_be_asked_for_routes(rig: Rig, engine: FakeEngine, status: int) -> None:
    engine.fail[RPC] = (status, {"error": {"message": "no attribute artd_take_routes"}})
    refused(rig, await rig.chat(), "cannot be had", "no attribute")
    assert (await rig.chat(headers={"x-artd-split": "eval"})).status_code == 200
    assert the_turn(rig).routes == b""


@pytest.mark.parametrize("fails", [True, False])
async def test_tokens_whose_routes_are_lost_are_not_generated_again(rig: Rig, fails: bool) -> None:
    await rig.limits(retry_s=1.0)
    engine = await moe(rig)
    if fails:
        engine.fail[RPC] = (500, {"error": {"message": "dead"}})
    else:
        engine.edit = lambda reply: engine.captured.clear()
    request = asyncio.create_task(rig.chat())
    await engine.entered.wait()
    await rig.daemon.route(merged(engine, 3, 4))
    refused(rig, await request, "routed experts")
    assert len(engine.bodies("/generate")) == 1


async def test_the_message_limit_counts_them(rig: Rig) -> None:
    await rig.limits(max_message=3000)
    engine = await moe(rig, RouteShape(layers=40, topk=2, experts=8))
    response = await rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (413, "ledger_entry_too_large")
    assert "(2400 of them routed experts)" in response.json()["error"]["message"]
    assert rig.daemon.ledger == [] and engine.captured == {}


async def test_what_cannot_fit_the_ledger_is_refused_before_it_is_sampled(rig: Rig) -> None:
    """As long as the request itself says how long answers may be."""
    await rig.limits(max_message=5000)
    engine = await moe(rig)
    response = await rig.chat(n=4, max_tokens=95)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, "ledger_entry_too_large")
    assert "4 choices of 75 tokens" in error["message"] and "nothing was sampled" in error["message"]
    assert engine.bodies("/generate") == [] and rig.daemon.ledger == []
    assert (await rig.chat(n=2)).status_code == 200, "short answers fit"
    assert (await rig.chat(n=1, max_tokens=95, headers={"x-artd-split": "eval"})).status_code == 200, "no routes"


# ---- dropped ------------------------------------------------------------------------------------------------------------


def methods(engine: FakeEngine) -> list[str]:
    return [body["method"] for body in engine.bodies(RPC)]


async def test_an_aborted_response_is_dropped(rig: Rig, engine: FakeEngine) -> None:
    engine.abort = [0, 2]
    assert (await rig.chat(n=2)).status_code == 503
    await until(lambda: methods(engine) == ["artd_drop_routes"])
    assert engine.captured == {}


async def test_a_failed_generate_is_dropped(rig: Rig, engine: FakeEngine) -> None:
    engine.edit = lambda reply: reply["choices"].pop()
    assert (await rig.chat(n=2)).status_code == 502
    await until(lambda: methods(engine) == ["artd_drop_routes"] and not engine.captured)


async def test_a_client_that_goes_leaves_nothing_behind(rig: Rig, engine: FakeEngine) -> None:
    engine.gate.clear()
    async with rig.client() as http:
        gone = [
            asyncio.create_task(http.post("/v1/completions", json={"model": "pol", "prompt": "a"})) for _ in range(30)
        ]
        await until(lambda: len(engine.captured) == 30)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
    await until(lambda: engine.cancelled == 30 and not engine.captured)
    assert methods(engine) == ["artd_drop_routes"] * 30 and rig.daemon.ledger == []
    await rig.daemon.say(w.Hold(push=1, fence=1, engine="e0"))
    assert rig.daemon.of(w.Held)[0].in_flight == 0


async def test_a_take_that_fails_is_followed_by_a_drop(rig: Rig, engine: FakeEngine) -> None:
    async def stubborn(request: Any, body: Any) -> Any:
        if body["method"] == "artd_take_routes":
            return {"results": "none"}
        engine.captured.clear()
        return {"results": [None]}

    engine.replace(RPC, stubborn)
    assert (await rig.chat()).status_code == 502
    await until(lambda: not engine.captured)


async def test_what_was_taken_needs_no_drop(rig: Rig, engine: FakeEngine) -> None:
    engine.fail["/derender"] = (500, {"error": {"message": "dead"}})
    assert (await rig.chat()).status_code == 502
    await asyncio.sleep(0.1)
    assert methods(engine) == ["artd_take_routes"] and engine.captured == {}


async def test_a_drop_that_hangs_delays_no_reply(rig: Rig, engine: FakeEngine) -> None:
    async def hangs(request: Any, body: Any) -> Any:
        await asyncio.sleep(2 * SOON_S)

    engine.replace(RPC, hangs)
    engine.abort = [2]
    async with asyncio.timeout(SOON_S / 2):
        assert (await rig.chat()).status_code == 503
    await until(lambda: methods(engine) == ["artd_drop_routes"])


async def test_a_drop_that_fails_is_nobodys_error(rig: Rig, engine: FakeEngine) -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    engine.fail[RPC] = (500, {"error": {"message": "EngineCore is dead"}})
    engine.abort = [2]
    assert (await rig.chat()).status_code == 503
    await until(lambda: methods(engine) == ["artd_drop_routes"])
    await asyncio.sleep(0.05)
    gc.collect()
    assert unhandled == []
    engine.abort = None
    engine.fail.clear()
    assert (await rig.chat()).status_code == 200


async def test_a_dense_engine_is_not_asked_to_drop(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    engine.abort = [2]
    assert (await rig.chat()).status_code == 503
    await asyncio.sleep(0.1)
    assert engine.bodies(RPC) == []


# ---- the field that vLLM puts into its reply -----------------------------------------------------------------------------


def npy(
    rows: int,
    layers: list[int],
    count: int = 5,
    dtype: type = np.uint8,
    shape: RouteShape = SHAPE,
    idle: Sequence[int] = (),
) -> str:
    """A reply's field: `layers` of `count` have the routes, the others are zero, and so are the MoE layers `idle`."""
    ids = np.zeros((rows, count, shape.topk), dtype)
    if layers:
        told = np.array(layer_rows(shape, rows_of(shape, 0, rows)), dtype)
        told[:, list(idle)] = 0
        ids[:, layers] = told
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def field(value: Any) -> Any:
    return lambda reply: reply["choices"][0].update(routed_experts=value)


@pytest.mark.parametrize(("layers", "count"), [([0, 1, 2], 3), ([1, 3, 4], 5), ([0, 1, 2], 4), ([0, 2, 4], 5)])
async def test_the_stock_field_is_cut_to_the_moe_layers(
    rig: Rig, engine: FakeEngine, layers: list[int], count: int
) -> None:
    engine.edit = field(npy(N, layers, count))
    assert (await rig.chat()).status_code == 200
    assert (the_turn(rig).routes, the_turn(rig).routes_start) == (GOOD, 0)
    assert engine.bodies(RPC) == []
    assert b"NUMPY" not in the_turn(rig).raw and b"k05VTV" not in the_turn(rig).raw
    assert "k05VTV" not in str(engine.bodies("/derender"))


async def test_the_stock_field_of_many_experts_and_a_later_start(rig: Rig) -> None:
    engine = await moe(rig, WIDE)
    engine.extra_params = {"routed_experts_prompt_start": 4}
    engine.edit = field(npy(N - 4, [0, 1], 3, np.uint16, WIDE))
    assert (await rig.chat()).status_code == 200
    assert (the_turn(rig).routes, the_turn(rig).routes_start) == (rows_of(WIDE, 0, N - 4), 4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (npy(N, [0, 1, 4], 5)[:-8], "unusable"),
        (npy(N - 1, [0, 1, 2]), "29 rows"),
        (npy(N, [0, 1, 2], 5, np.uint16), "of 2 bytes"),
        (npy(N, [], 5), "captured nothing"),
        (npy(N, [], 3), "captured nothing"),
        (npy(N, [0, 1], 5, shape=RouteShape(layers=2, topk=2, experts=8)), "2 of 5 layers"),
        (npy(N, [0, 1, 2, 3], 5, shape=RouteShape(layers=4, topk=2, experts=8)), "4 of 5 layers"),
        (npy(N, [0, 1, 2], 5, np.int32), "dtype"),
        ("!!!", "base64"),
        (base64.b64encode(b"text").decode(), "no .npy"),
        ([[1]], "list"),
    ],
)
async def test_a_stock_field_that_does_not_fit_is_a_502(rig: Rig, engine: FakeEngine, value: Any, words: str) -> None:
    engine.edit = field(value)
    refused(rig, await rig.chat(), words)


TOP1 = RouteShape(layers=3, topk=1, experts=8)


@pytest.mark.parametrize(("idle", "count", "layers"), [((), 5, [0, 2, 4]), ((1,), 3, [0, 1, 2])])
async def test_the_stock_field_of_top_1(rig: Rig, idle: tuple[int, ...], count: int, layers: list[int]) -> None:
    """A layer may have chosen expert 0 throughout; without dense layers that is no question."""
    engine = await moe(rig, TOP1)
    engine.edit = field(npy(N, layers, count, shape=TOP1, idle=idle))
    assert (await rig.chat()).status_code == 200
    ids = np.array(layer_rows(TOP1, rows_of(TOP1, 0, N)), np.uint8)
    ids[:, list(idle)] = 0
    assert the_turn(rig).routes == ids.tobytes()


@pytest.mark.parametrize(("idle", "zero"), [((1,), 3), ((0, 1, 2), 5)])
async def test_with_top_1_dense_layers_are_not_guessed(rig: Rig, idle: tuple[int, ...], zero: int) -> None:
    engine = await moe(rig, TOP1)
    engine.edit = field(npy(N, [0, 2, 4], 5, shape=TOP1, idle=idle))
    refused(rig, await rig.chat(), f"{zero} of 5 layers are all zero, where 2 have no experts", "worker extension")


# ---- shown to the client -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_a_client_that_asks_for_token_ids_gets_them_as_numpy_reads_them(
    rig: Rig, shape: RouteShape, endpoint: str
) -> None:
    await moe(rig, shape)
    plain = (await getattr(rig, endpoint)()).json()["choices"][0]
    assert "routed_experts" not in str(plain)
    choice = (await getattr(rig, endpoint)(return_token_ids=True)).json()["choices"][0]
    bearer = choice["message"] if endpoint == "chat" else choice
    turn = rig.daemon.ledger[1][1][0]
    ids = np.load(io.BytesIO(base64.b64decode(bearer["routed_experts"])), allow_pickle=False)
    rows = len(bearer["prompt_token_ids"]) + len(bearer["generation_token_ids"]) - 1
    assert ids.shape == (rows, shape.layers, shape.topk) and ids.dtype == (np.uint8 if shape is SHAPE else np.uint16)
    assert ids.tobytes() == turn.routes and bearer["routed_experts_start"] == 0
    assert b"routed_experts" not in turn.raw and not msgspec.json.decode(turn.raw)["engine"]["choices"][0].get("routes")


async def test_alternatives_come_with_their_ids(rig: Rig, engine: FakeEngine) -> None:
    more = [{"token_id": 7, "logprob": -3.0, "rank": 3}, {"token_id": 9, "logprob": -0.1, "rank": 1}]
    engine.edit = lambda reply: reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"].extend(more)
    choice = (await rig.complete(return_token_ids=True, logprobs=2)).json()["choices"][0]
    first = choice["generation_log_probs"][0]
    assert choice["generation_top_log_probs"][0] == sorted(
        [[ord("P"), first], [7, -3.0], [9, -0.1]], key=lambda p: -p[1]
    )
    assert len(choice["generation_top_log_probs"]) == 6
    assert "generation_top_log_probs" not in (await rig.complete(return_token_ids=True)).json()["choices"][0]
