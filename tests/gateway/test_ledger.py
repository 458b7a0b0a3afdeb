"""The ledger: what is written, and that it is durable before the client has its response."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from artd_schema.wire import worker as w
from tests.awake import SOON_S, until
from tests.gateway.fake_engine import FakeEngine, logprob
from tests.gateway.rig import Rig, floats, ints, lora, merged, text_of

pytestmark = pytest.mark.asyncio


async def test_an_exchange_holds_what_was_generated(rig: Rig, engine: FakeEngine) -> None:
    body = (await rig.chat(temperature=0.7, seed=5, max_tokens=50)).json()
    exchange, (turn,) = rig.daemon.ledger[0]
    assert (exchange.response_id, exchange.run, exchange.model) == (body["id"], "pol", "pol@3")
    assert (exchange.split, exchange.choices, exchange.completion_tokens) == ("train", 1, 6)
    assert exchange.prompt_tokens == len("<user>Capital?<assistant>")
    assert exchange.seconds > 0
    assert exchange.sampling == turn.sampling
    assert (turn.sampling.temperature, turn.sampling.seed, turn.sampling.max_tokens) == (0.7, 5, 50)
    assert text_of(turn.prompt_ids) == "<user>Capital?<assistant>"
    assert ints(turn.token_ids) == [ord(char) for char in "Paris$"]
    assert floats(turn.logprobs) == [logprob(ord(char), 0) for char in "Paris$"]
    assert (turn.response_id, turn.choice, turn.finish_reason) == (body["id"], 0, "stop")
    assert turn.policy_epoch == turn.kv_cache_epoch == ((0, 4),)


async def test_effective_sampling_fills_in_what_the_client_left_out(rig: Rig, engine: FakeEngine) -> None:
    await rig.chat(top_p=0.9, top_k=-1, max_tokens=95, headers={"x-artd-split": "eval"})
    _, (turn,) = rig.daemon.ledger[0]
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) == (1.0, 0.9, 0)
    assert turn.sampling.max_tokens == 100 - len("<user>Capital?<assistant>")


async def test_the_raw_response_keeps_unknown_fields_and_leaves_out_the_columns(rig: Rig, engine: FakeEngine) -> None:
    engine.edit = lambda reply: reply["choices"][0].update(new_field={"a": 1})
    body = (await rig.chat(logprobs=True)).json()
    _, (turn,) = rig.daemon.ledger[0]
    raw = msgspec.json.decode(turn.raw)
    assert raw["id"] == body["id"]
    assert raw["choices"][0]["message"]["content"] == "Paris"
    assert raw["engine"]["choices"][0]["new_field"] == {"a": 1}
    assert not raw["choices"][0]["logprobs"]
    assert b"token_ids" not in turn.raw
    assert b"top_logprobs" not in turn.raw


async def test_the_response_waits_for_the_acknowledgement(rig: Rig, engine: FakeEngine) -> None:
    rig.daemon.acknowledge = False
    request = asyncio.create_task(rig.chat())
    await until(lambda: rig.daemon.ledger)
    await asyncio.sleep(0.2)
    assert not request.done()
    response_id = rig.daemon.ledger[0][0].response_id
    await rig.daemon.say(w.ExchangeAck(response_id="chatcmpl-other"))
    await asyncio.sleep(0.05)
    assert not request.done()
    await rig.daemon.say(w.ExchangeAck(response_id=response_id))
    assert (await request).json()["id"] == response_id


async def test_no_byte_of_the_response_leaves_before_the_acknowledgement(rig: Rig, engine: FakeEngine) -> None:
    rig.daemon.acknowledge = False
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = b'{"model": "pol", "prompt": "hi"}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\nauthorization: {rig.bearer}\r\n\r\n"
    writer.write(head.encode("utf-8") + content)
    await until(lambda: rig.daemon.ledger)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reader.read(1)
    await rig.daemon.say(w.ExchangeAck(response_id=rig.daemon.ledger[0][0].response_id))
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_refused_entry_is_a_503_with_the_daemons_words(rig: Rig, engine: FakeEngine) -> None:
    rig.daemon.refusal = "the disk is full"
    response = await rig.chat()
    assert response.status_code == 503
    assert "the disk is full" in response.json()["error"]["message"]
    assert "Paris" not in response.text
    assert response.headers["retry-after"]


async def test_an_acknowledgement_that_never_comes_is_a_503(rig: Rig) -> None:
    await rig.limits(ledger_s=0.2)
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    rig.daemon.acknowledge = False
    response = await rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "ledger_timeout")


async def test_an_entry_over_the_message_limit_is_refused_by_name_and_never_sent(rig: Rig) -> None:
    await rig.limits(max_message=700)
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    response = await rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (413, "ledger_entry_too_large")
    assert "max_message = 700" in response.json()["error"]["message"]
    assert rig.daemon.ledger == []


async def test_the_split_header_marks_an_exchange_as_eval(rig: Rig, engine: FakeEngine) -> None:
    assert (await rig.chat(headers={"x-artd-split": "eval"})).status_code == 200
    assert rig.daemon.ledger[0][0].split == "eval"


async def test_an_unknown_split_is_a_400(rig: Rig, engine: FakeEngine) -> None:
    response = await rig.chat(headers={"x-artd-split": "test"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_split")
    assert rig.daemon.ledger == []


async def test_sampling_that_the_ledger_cannot_describe_is_for_eval_only(rig: Rig, engine: FakeEngine) -> None:
    response = await rig.chat(bad_words=["Lyon"])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "untrainable_sampling")
    assert "bad_words" in response.json()["error"]["message"]
    assert engine.bodies("/generate") == []
    assert (await rig.chat(bad_words=["Lyon"], headers={"x-artd-split": "eval"})).status_code == 200


UNTRAINABLE = {
    "top_p": 0.9, "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRAINABLE)
async def test_sampling_that_cannot_be_trained_on_is_refused_before_it_is_paid_for(
    rig: Rig, engine: FakeEngine, name: str
) -> None:
    asked = {name: UNTRAINABLE[name]}
    engine.extra_params = asked
    for response in (await rig.chat(**asked), await rig.complete(**asked)):
        told = response.json()["error"]
        assert (response.status_code, told["code"], told["param"]) == (400, "untrainable_sampling", name)
        assert f"{name}={UNTRAINABLE[name]} cannot be trained on" in told["message"]
        assert "; send " in told["message"] and "`x-artd-split: eval`" in told["message"]
        assert "default" not in told["message"]
    assert engine.bodies("/generate") == [] and rig.daemon.ledger == []
    assert (await rig.chat(**asked, headers={"x-artd-split": "eval"})).status_code == 200


async def test_a_greedy_request_is_answered_whatever_its_split(rig: Rig, engine: FakeEngine) -> None:
    """By a program that evaluates and cannot send a header."""
    engine.extra_params = {"temperature": 0.0, "top_p": 0.9}
    assert (await rig.chat(temperature=0, top_p=0.9)).status_code == 200
    assert len(engine.bodies("/generate")) == 1


async def test_all_parameters_that_cannot_be_trained_on_are_named_at_once(rig: Rig, engine: FakeEngine) -> None:
    told = (await rig.chat(temperature=0.7, top_p=0.8, top_k=20)).json()["error"]
    assert "top_p=0.8, top_k=20 cannot be trained on" in told["message"]
    assert "; send top_p=1.0, top_k=0, or" in told["message"]
    assert (await rig.chat(temperature=0.7, top_p=1.0, top_k=-1, min_p=0)).status_code == 200


async def test_a_default_of_the_engine_is_not_told_as_the_clients(rig: Rig, engine: FakeEngine) -> None:
    """A server without `--generation-config vllm` samples with its model's defaults."""
    engine.extra_params = {"top_p": 0.8, "top_k": 20}
    told = (await rig.chat(top_k=20)).json()["error"]
    assert "top_p=0.8 (the engine's own default), top_k=20 cannot be trained on" in told["message"]
    engine.extra_params = {}
    assert (await rig.chat(top_p=1.0, top_k=0)).status_code == 200


# ---- policy epochs ------------------------------------------------------------------------------------------------------


async def test_version_spans_become_epochs_by_the_label_of_the_push(rig: Rig, engine: FakeEngine) -> None:
    await rig.daemon.route(merged(engine, 4, 6))
    engine.versions = [("pol@3", 0.5), ("pol@4", 1.0)]
    body = (await rig.chat()).json()
    exchange, (turn,) = rig.daemon.ledger[0]
    assert turn.policy_epoch == ((0, 4), (3, 6))
    assert turn.kv_cache_epoch == (), "the replies do not say it, and this engine's worker does not know"
    assert body["model"] == exchange.model == "pol@4"


async def test_neighbouring_spans_of_one_epoch_are_one_run(rig: Rig, engine: FakeEngine) -> None:
    engine.versions = [("default", 0.5), ("pol@3", 1.0)]
    await rig.chat()
    assert rig.daemon.ledger[0][1][0].policy_epoch == ((0, 4),)


async def test_a_response_waits_for_the_route_that_names_its_weights(rig: Rig) -> None:
    await rig.limits(label_s=SOON_S)
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    engine.versions = [("pol@4", 1.0)]
    request = asyncio.create_task(rig.chat())
    await asyncio.sleep(0.2)
    assert not request.done()
    await rig.daemon.route(merged(engine, 4, 6))
    assert (await request).json()["model"] == "pol@4"
    assert rig.daemon.ledger[0][1][0].policy_epoch == ((0, 6),)


async def test_after_a_rollback_a_label_stands_for_the_new_step_alone(rig: Rig) -> None:
    """Step 4 is left, step 3 served again, and another step 4 comes: its tokens wait for the route that tells its epoch."""
    await rig.limits(label_s=SOON_S)
    engine = await rig.engine()
    for step, epoch in ((3, 4), (4, 6), (3, 4)):
        await rig.daemon.route(merged(engine, step, epoch))
    engine.versions = [("pol@4", 1.0)]
    request = asyncio.create_task(rig.chat())
    await asyncio.sleep(0.2)
    assert not request.done(), "the epoch of the step that was left was stamped"
    await rig.daemon.route(merged(engine, 4, 8))
    assert (await request).status_code == 200
    assert rig.daemon.ledger[0][1][0].policy_epoch == ((0, 8),)


async def test_weights_that_no_route_names_are_never_recorded(rig: Rig, engine: FakeEngine) -> None:
    engine.versions = [("pol@9", 1.0)]
    response = await rig.chat()
    assert response.status_code == 502
    assert "pol@9" in response.json()["error"]["message"]
    assert rig.daemon.ledger == []


async def test_a_pinned_request_is_never_answered_by_other_weights(rig: Rig, engine: FakeEngine) -> None:
    engine.gate.clear()
    request = asyncio.create_task(rig.chat(model="pol@3"))
    await engine.entered.wait()
    await rig.daemon.route(merged(engine, 4, 6))
    engine.versions = [("pol@3", 0.5), ("pol@4", 1.0)]
    engine.gate.set()
    response = await request
    assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")
    assert rig.daemon.ledger == []


async def test_in_lora_mode_the_epoch_is_the_adapters(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.daemon.route(lora(engine, (1, 2), (2, 5)))
    engine.versions = [("pol@0", 1.0)]  # of the base weights: no matter
    body = (await rig.chat(model="pol@1")).json()
    assert body["model"] == "pol@1"
    assert engine.bodies("/generate")[0]["model"] == "pol@1"
    assert rig.daemon.ledger[0][1][0].policy_epoch == ((0, 2),)
    assert (await rig.chat()).json()["model"] == "pol@2"
    assert rig.daemon.ledger[1][1][0].policy_epoch == ((0, 5),)
    salts = [body["cache_salt"] for body in engine.bodies("/generate")]
    assert salts == ["2:", "5:"], "an adapter of another lineage may come under the same name"


async def test_an_adapter_may_be_unloaded_once_its_tokens_are_out(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.daemon.route(lora(engine, (1, 2)))
    engine.edit = lambda reply: engine.models.discard("pol@1")
    assert (await rig.chat()).json()["model"] == "pol@1"


# ---- replies that do not fit together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "word"),
    [
        (lambda c: c["logprobs"]["content"].pop(), "logprobs"),
        (lambda c: c["logprobs"]["content"][0].update(token_id=7), "logprobs"),
        (lambda c: c.update(logprobs=None), "logprobs"),
        (lambda c: c["logprobs"]["content"][1].update(logprob=-9999.0), "-9999"),
        (lambda c: c["logprobs"]["content"][1].update(logprob=0.5), "0.5"),
        (lambda c: c["weight_versions"][0].update(end=3), "spans"),
        (lambda c: c["weight_versions"][0].update(start=1), "spans"),
        (lambda c: c.update(token_ids=[]), "without tokens"),
    ],
)
async def test_an_inconsistent_reply_is_a_502_and_never_recorded(
    rig: Rig, engine: FakeEngine, break_it: object, word: str
) -> None:
    engine.edit = lambda reply: break_it(reply["choices"][0])
    response = await rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")
    assert word in response.json()["error"]["message"]
    assert "e0" in response.json()["error"]["message"]
    assert rig.daemon.ledger == []


async def test_a_logprob_a_rounding_above_zero_is_zero(rig: Rig, engine: FakeEngine) -> None:
    engine.edit = lambda reply: reply["choices"][0]["logprobs"]["content"][0].update(logprob=1e-7)
    assert (await rig.chat()).status_code == 200
    assert floats(rig.daemon.ledger[0][1][0].logprobs)[0] == 0.0
