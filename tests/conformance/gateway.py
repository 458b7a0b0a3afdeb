"""What every dialect has to do, as cases of (rig, engine) with a scripted engine that speaks the dialect.

The author of another engine writes a `FakeEngine` that speaks the dialect, with `kind`, `salts` and `field`, and passes these
cases.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from artd_schema.data.trajectory import RouteShape, Turn
from artd_schema.wire import worker as w
from tests.awake import until
from tests.fakes.routes import rows_of
from tests.gateway.fake_engine import FakeEngine, logprob
from tests.gateway.rig import Rig, floats, ints, merged

Case = Callable[[Rig, FakeEngine], Awaitable[None]]
SHAPE = RouteShape(layers=2, topk=2, experts=8)
PROMPT = "<user>Capital?<assistant>"


def turns(rig: Rig) -> list[Turn]:
    return rig.daemon.ledger[-1][1]


async def a_chat_is_rendered_generated_and_derendered(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["Paris$", "Lyon$"]
    body = (await rig.chat(n=2, return_token_ids=True, temperature=0.7)).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["Paris", "Lyon"]
    for index, (turn, text) in enumerate(zip(turns(rig), engine.texts, strict=True)):
        assert ints(turn.prompt_ids) == [ord(char) for char in PROMPT]
        assert ints(turn.token_ids) == [ord(char) for char in text]
        assert floats(turn.logprobs) == [logprob(ord(char), index) for char in text]
        assert (turn.sampling.temperature, turn.finish_reason) == (0.7, "stop")
        assert body["choices"][index]["message"]["generation_token_ids"] == ints(turn.token_ids)


async def a_chat_streams_what_the_whole_reply_says(rig: Rig, engine: FakeEngine) -> None:
    for texts in (["Paris$", "Lyon$"], ["Paris. And$"]):
        engine.texts = texts
        asked = {"n": len(texts), "stop": [". A"], "logprobs": True}
        whole = (await rig.chat(**asked)).json()
        lines = (await rig.chat(**asked, stream=True)).text.splitlines()
        assert lines[-2] == "data: [DONE]"
        chunks = [json.loads(line[6:])["choices"][0] for line in lines[:-2] if line]
        for index, choice in enumerate(whole["choices"]):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert len(mine) > 3
            assert "".join(chunk["delta"].get("content", "") for chunk in mine) == choice["message"]["content"]
            spelt = [one for chunk in mine if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
            assert len(spelt) == len(ints(turns(rig)[index].token_ids))
            assert spelt == (choice["logprobs"] or {"content": spelt})["content"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
        (_, first), (_, second) = rig.daemon.ledger[-2:]
        assert [turn.token_ids + turn.logprobs for turn in first] == [turn.token_ids + turn.logprobs for turn in second]


async def a_stream_that_fails_before_its_first_token_is_an_error_reply(rig: Rig, engine: FakeEngine) -> None:
    engine.stream_error = {"message": "maximum context length", "code": 400}
    assert (await rig.chat(stream=True)).json()["error"]["code"] == "context_length_exceeded"
    engine.stream_error = {"message": "it fell", "code": 500}
    failed = await rig.chat(stream=True)
    assert failed.status_code == 502 and "it fell" in failed.text and rig.daemon.ledger == []


async def every_prompt_of_a_completion_has_its_choices(rig: Rig, engine: FakeEngine) -> None:
    body = (await rig.complete(prompt=["one", "three"], n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["Paris"] * 4
    assert [len(ints(turn.prompt_ids)) for turn in turns(rig)] == [3, 3, 5, 5]


async def a_stop_string_is_no_text_and_stays_a_token(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["Paris. And Rome$"]
    body = (await rig.chat(stop=[". A"])).json()
    assert body["choices"][0]["message"]["content"] == "Paris"
    assert "".join(map(chr, ints(turns(rig)[0].token_ids))) == "Paris. A"


async def alternatives_come_with_their_ids(rig: Rig, engine: FakeEngine) -> None:
    body = (await rig.chat(return_token_ids=True, logprobs=True, top_logprobs=1)).json()
    assert body["choices"][0]["message"]["generation_top_log_probs"][0] == [[ord("P"), logprob(ord("P"), 0)]]


async def what_does_not_fit_and_what_cannot_be_trained_is_the_clients_error(rig: Rig, engine: FakeEngine) -> None:
    for asked, code in (
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "context_length_exceeded"),
        ({"bad_words": ["no"]}, "untrainable_sampling"),
    ):
        refused = await rig.chat(**asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code), refused.text
    assert rig.daemon.ledger == [] and engine.salts() == []


async def another_epoch_has_another_cache(rig: Rig, engine: FakeEngine) -> None:
    await rig.chat()
    await rig.chat()
    await rig.daemon.route(merged(engine, 4, 6))
    await rig.chat()
    first, again, later = engine.salts()
    assert first == again != later


async def the_experts_of_every_token_reach_the_ledger(rig: Rig, engine: FakeEngine) -> None:
    """By asking for them, and, where the engine can, with its reply."""
    engine.routes = SHAPE
    await rig.daemon.route(merged(engine, 3, 4))
    for field in (False, True):
        engine.field = field
        assert (await rig.chat()).status_code == 200
        assert turns(rig)[0].routes == rows_of(SHAPE, 0, len(PROMPT) + 5) and engine.captured == {}


async def what_was_captured_for_a_failed_request_is_dropped(rig: Rig, engine: FakeEngine) -> None:
    engine.routes = SHAPE
    await rig.daemon.route(merged(engine, 3, 4))
    engine.abort = [0]
    assert (await rig.chat()).status_code == 502
    await until(lambda: not engine.captured)
    assert rig.daemon.ledger == []


async def who_sampled_each_token_is_told_across_a_push(rig: Rig, engine: FakeEngine) -> None:
    engine.versions = []
    engine.sampled = [{"policy": [[0, "pol@3"], [4, "pol@4"]], "cache": [[0, "pol@3"], [3, "pol@4"]]}]
    engine.gate.clear()
    engine.entered.clear()
    request = asyncio.create_task(rig.chat())
    await engine.entered.wait()
    await rig.daemon.say(w.Hold(push=1, fence=1, engine="e0"))
    await rig.daemon.route(merged(engine, 4, 6))
    engine.gate.set()
    assert (await request).status_code == 200
    assert (turns(rig)[0].policy_epoch, turns(rig)[0].kv_cache_epoch) == (((0, 4), (4, 6)), ((0, 4), (3, 6)))


async def a_reply_that_names_its_weights_is_believed(rig: Rig, engine: FakeEngine) -> None:
    engine.versions = [("pol@3", 1.0)]
    assert (await rig.chat()).status_code == 200 and turns(rig)[0].policy_epoch == ((0, 4),)
    engine.versions = [("pol@9", 1.0)]
    assert (await rig.chat()).status_code == 502 and len(rig.daemon.ledger) == 1


async def an_engine_that_fails_anywhere_is_a_502_without_an_entry(rig: Rig, engine: FakeEngine) -> None:
    await rig.chat()
    steps = [path for path, _ in engine.calls]
    rig.daemon.ledger.clear()
    assert len(steps) == len(set(steps)) >= 3
    for path in steps:
        engine.fail = {path: (500, {"error": {"message": "it fell"}})}
        failed = await rig.chat()
        assert failed.status_code == 502 and "it fell" in failed.json()["error"]["message"], path
    engine.fail = {}
    assert rig.daemon.ledger == [] and (await rig.chat()).status_code == 200


CASES: tuple[Case, ...] = (
    a_chat_is_rendered_generated_and_derendered, a_chat_streams_what_the_whole_reply_says,
    a_stream_that_fails_before_its_first_token_is_an_error_reply, every_prompt_of_a_completion_has_its_choices,
    a_stop_string_is_no_text_and_stays_a_token, alternatives_come_with_their_ids,
    what_does_not_fit_and_what_cannot_be_trained_is_the_clients_error, another_epoch_has_another_cache,
    the_experts_of_every_token_reach_the_ledger, what_was_captured_for_a_failed_request_is_dropped,
    who_sampled_each_token_is_told_across_a_push, a_reply_that_names_its_weights_is_believed,
    an_engine_that_fails_anywhere_is_a_502_without_an_entry,
)  # fmt: skip
