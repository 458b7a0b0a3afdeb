"""What a response holds: text, names, ids, logprobs, usage; and what the engine is asked for it."""

from __future__ import annotations

import re

import pytest

from tests.gateway.fake_engine import FakeEngine, logprob
from tests.gateway.rig import Rig, ints, text_of

pytestmark = pytest.mark.asyncio


async def test_a_chat_completion_has_the_served_name_and_an_id_of_the_gateway(rig: Rig, engine: FakeEngine) -> None:
    response = await rig.chat()
    assert response.status_code == 200, response.text
    body = response.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body["id"])
    assert body["model"] == "pol@3"
    assert body["choices"][0]["message"]["content"] == "Paris"
    assert body["choices"][0]["finish_reason"] == "stop"
    prompt = len("<user>Capital?<assistant>")
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}


async def test_ids_differ_between_requests(rig: Rig, engine: FakeEngine) -> None:
    assert (await rig.chat()).json()["id"] != (await rig.chat()).json()["id"]


async def test_the_engine_is_asked_by_its_own_name_and_gets_a_fresh_request_id(rig: Rig, engine: FakeEngine) -> None:
    body = (await rig.chat()).json()
    assert [call["model"] for _, call in engine.calls] == ["tiny", "tiny", "tiny"]
    assert engine.bodies("/generate")[0]["request_id"].startswith(body["id"])


async def test_a_completion(rig: Rig, engine: FakeEngine) -> None:
    body = (await rig.complete()).json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body["id"])
    assert body["model"] == "pol@3"
    assert body["choices"][0]["text"] == "Paris"


async def test_n_choices_come_in_order_each_with_its_own_turn(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["Paris$", "Lyon$"]
    body = (await rig.chat(n=2)).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "Paris"), (1, "Lyon")]
    exchange, turns = rig.daemon.ledger[0]
    assert exchange.choices == 2
    assert [(turn.choice, text_of(turn.token_ids)) for turn in turns] == [(0, "Paris$"), (1, "Lyon$")]
    assert body["usage"]["completion_tokens"] == exchange.completion_tokens == 11


async def test_several_prompts_give_choices_prompt_by_prompt(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["a$", "b$"]
    body = (await rig.complete(prompt=["first", "second!"], n=2)).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    _, turns = rig.daemon.ledger[0]
    assert [text_of(turn.prompt_ids) for turn in turns] == ["first", "first", "second!", "second!"]
    assert [turn.choice for turn in turns] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == len("first") + len("second!")


async def test_the_text_ends_before_a_stop_string_and_the_ledger_keeps_its_tokens(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["Paris. And more$"]
    body = (await rig.chat(stop=[". A"])).json()
    assert body["choices"][0]["message"]["content"] == "Paris"
    assert body["choices"][0]["finish_reason"] == "stop"
    _, (turn,) = rig.daemon.ledger[0]
    assert text_of(turn.token_ids) == "Paris. A"
    assert turn.sampling.stop == (". A",)


async def test_a_stop_string_stays_when_it_is_asked_for(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["Paris. And"]
    engine.extra_params = {"include_stop_str_in_output": True}
    body = (await rig.chat(stop=[". A"])).json()
    assert body["choices"][0]["message"]["content"] == "Paris. A"


async def test_the_text_ends_before_a_stop_token(rig: Rig, engine: FakeEngine) -> None:
    engine.texts = ["ab!cd", "!cd"]
    body = (await rig.chat(n=2, stop_token_ids=[ord("!")])).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["ab", ""]
    _, turns = rig.daemon.ledger[0]
    assert [text_of(turn.token_ids) for turn in turns] == ["ab!", "!"]


async def test_max_tokens_temperature_and_seed_reach_the_engine(rig: Rig, engine: FakeEngine) -> None:
    body = (await rig.chat(max_tokens=3, temperature=0.5, seed=11)).json()
    assert body["choices"][0]["message"]["content"] == "Par"
    assert body["choices"][0]["finish_reason"] == "length"
    params = engine.bodies("/generate")[0]["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["seed"]) == (3, 0.5, 11)


async def test_max_tokens_16_is_a_limit_although_the_engine_leaves_it_out_when_it_renders(
    rig: Rig, engine: FakeEngine
) -> None:
    engine.texts = ["x" * 60]
    body = (await rig.chat(max_tokens=16)).json()
    assert body["choices"][0]["message"]["content"] == "x" * 16
    assert rig.daemon.ledger[0][0].sampling.max_tokens == 16


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_logprobs_are_asked_from_the_engine_but_hidden_unless_the_client_asks(
    rig: Rig, engine: FakeEngine, endpoint: str
) -> None:
    body = (await getattr(rig, endpoint)()).json()
    assert engine.bodies("/generate")[0]["sampling_params"]["logprobs"] == 0
    assert body["choices"][0]["logprobs"] is None
    assert "-0.5" not in str(body)
    asked = {"logprobs": True, "top_logprobs": 2} if endpoint == "chat" else {"logprobs": 2}
    shown = (await getattr(rig, endpoint)(**asked)).json()["choices"][0]["logprobs"]
    assert engine.bodies("/generate")[1]["sampling_params"]["logprobs"] == 2
    key = "content" if endpoint == "chat" else "token_logprobs"
    values = [entry["logprob"] if endpoint == "chat" else entry for entry in shown[key]]
    assert values == [logprob(ord(char), 0) for char in "Paris$"]


async def test_logprobs_zero_counts_as_asked_for_completions(rig: Rig, engine: FakeEngine) -> None:
    assert (await rig.complete(logprobs=0)).json()["choices"][0]["logprobs"] is not None


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_token_ids_come_with_the_choice_when_asked_for(rig: Rig, engine: FakeEngine, endpoint: str) -> None:
    plain = (await getattr(rig, endpoint)()).json()["choices"][0]
    assert "generation_token_ids" not in str(plain)
    choice = (await getattr(rig, endpoint)(return_token_ids=True)).json()["choices"][0]
    bearer = choice["message"] if endpoint == "chat" else choice
    _, (turn,) = rig.daemon.ledger[1]
    assert bearer["prompt_token_ids"] == ints(turn.prompt_ids)
    assert bearer["generation_token_ids"] == [ord(char) for char in "Paris$"]
    assert bearer["generation_log_probs"] == [logprob(ord(char), 0) for char in "Paris$"]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(("text", "shown"), [("Par$", "Par"), ("$", ""), ("Pa$r", "Pa")])
@pytest.mark.parametrize("told", [True, False])
async def test_the_eos_is_no_text_although_special_tokens_are(
    rig: Rig, engine: FakeEngine, endpoint: str, text: str, shown: str, told: bool
) -> None:
    """As vLLM's own endpoint. told: whether the engine tells stop reasons, as vLLM 0.32 does and 0.25 does not."""
    engine.texts = [text]
    if not told:
        engine.edit = lambda reply: [choice.pop("stop_reason") for choice in reply["choices"]]
    choice = (await getattr(rig, endpoint)(skip_special_tokens=False)).json()["choices"][0]
    assert (choice["message"]["content"] if endpoint == "chat" else choice["text"]) == shown
    assert ints(rig.daemon.ledger[0][1][0].token_ids)[-1] == ord("$"), "it is trained"


async def test_tool_calls_end_with_the_finish_reason_of_openai(rig: Rig, engine: FakeEngine) -> None:
    engine.tool_calls = [{"id": "t", "type": "function"}]
    assert (await rig.chat()).json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_in_merged_mode_the_prefix_cache_is_salted_with_the_epoch(rig: Rig, engine: FakeEngine) -> None:
    await rig.chat()
    assert engine.bodies("/generate")[0]["cache_salt"].startswith("4:")
