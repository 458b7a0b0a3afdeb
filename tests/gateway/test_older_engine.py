"""What vLLM 0.25 leaves out of a generate reply (seen in its source): ids of logprobs, stop reasons, versions of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.fake_engine import FakeEngine, logprob
from tests.gateway.rig import Rig, floats, ints

pytestmark = pytest.mark.asyncio


def as_025(reply: dict[str, Any]) -> None:
    """Make a reply of 0.32 one of 0.25."""
    for choice in reply["choices"]:
        for name in ("stop_reason", "weight_versions", "sampling_mask"):
            del choice[name]
        choice["logprobs"] = {"content": [_entry(entry) for entry in choice["logprobs"]["content"]]}


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    told = {"token": f"token_id:{entry['token_id']}", "logprob": entry["logprob"], "bytes": None}
    return told | ({"top_logprobs": [_entry(one | {"top_logprobs": None}) for one in entry["top_logprobs"] or ()]})


@pytest.fixture
def older(engine: FakeEngine) -> FakeEngine:
    engine.edit = as_025
    return engine


async def test_its_replies_reach_the_ledger_whole(rig: Rig, older: FakeEngine) -> None:
    body = (await rig.chat(return_token_ids=True, temperature=0.7)).json()
    _, (turn,) = rig.daemon.ledger[0]
    assert (
        ints(turn.token_ids)
        == [ord(char) for char in "Paris$"]
        == body["choices"][0]["message"]["generation_token_ids"]
    )
    assert floats(turn.logprobs) == [logprob(ord(char), 0) for char in "Paris$"]
    assert turn.policy_epoch == ((0, 4),), "what the route said on entry"


@pytest.mark.parametrize("spoil", [
    lambda entry: entry.update(token="token_id:7"), lambda entry: entry.update(token="P"), lambda entry: entry.pop("token"),
])  # fmt: skip
async def test_a_logprob_of_another_token_is_refused(
    rig: Rig, engine: FakeEngine, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    def edit(reply: dict[str, Any]) -> None:
        as_025(reply)
        spoil(reply["choices"][0]["logprobs"]["content"][0])

    engine.edit = edit
    response = await rig.chat()
    assert response.status_code == 502 and "do not belong" in response.json()["error"]["message"]
    assert rig.daemon.ledger == []


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"stop": [". A", "zz"]}, "Paris"),
        ({"stop_token_ids": [ord("!")]}, "Paris. A"),
        ({}, "Paris. A!?"),
        ({"max_tokens": 8}, "Paris. A"),
    ],
)
async def test_texts_end_before_what_stopped_them(
    rig: Rig, older: FakeEngine, asked: dict[str, Any], shown: str
) -> None:
    older.texts = ["Paris. A!?$"]
    body = (await rig.chat(**asked)).json()
    assert body["choices"][0]["message"]["content"] == shown


async def test_alternatives_are_told_by_their_ids(rig: Rig, older: FakeEngine) -> None:
    body = (await rig.chat(return_token_ids=True, logprobs=True, top_logprobs=1)).json()
    first = body["choices"][0]["message"]["generation_top_log_probs"][0]
    assert first == [[ord("P"), logprob(ord("P"), 0)]]
