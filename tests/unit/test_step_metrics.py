"""What a step tells of its rollouts: what was trained, what was not and why, and what was sampled beside it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artd.api.listing import read_rows
from artd.packing.batch import PackSpec, pack
from artd.packing.measures import CLIENT_NAMES, client
from artd_schema.data.manifest import Drop
from artd_schema.wire import client_api as api
from tests.fakes.rows import add_run, data_dir, floats, ids, make_ingest, one, open_store, submit, turn
from tests.fakes.steps import commit_next
from tests.fakes.steps import pack as pack_next
from tests.unit import packing_oracle as oracle

SPEC = PackSpec(run="r", step=1, seed=0, row_length=64, scale_rewards=True, base_digest="b")
NEW = range(1000, 1020)
"""A prompt that repeats nothing, so that its turn is a sequence of its own."""


def answer(length: int, end: str = "stop", prompt: Any = range(8)) -> Any:
    return oracle.turn(prompt, range(length), finish_reason=end)


def test_what_is_not_trained_is_counted_by_its_reason() -> None:
    sources = [
        oracle.source(1, 1, 1.0, [answer(10)]),
        oracle.source(2, 1, 0.0, [answer(90, "length")]),  # too long
        oracle.source(3, 1, 0.0, [answer(20), answer(50, "length", NEW)]),  # its second sequence is
        oracle.source(4, 1, 0.0, [answer(0, "")]),  # nothing was sampled
        oracle.source(5, 2, 1.0, [answer(9)]),  # a group without a difference
        oracle.source(6, 2, 1.0, [answer(9)]),
    ]
    _, manifest, _ = pack(SPEC, sources)
    found = manifest.metrics
    assert found == {
        "trained_trajectories": 2, "trained_sequences": 2, "dropped_trajectories": 4, "shortened_trajectories": 1,
        "dropped_sequences": 3, "dropped_tokens": 140, "dropped_too_long": 2, "dropped_no_tokens": 1, "dropped_no_turns": 0,
        "dropped_group": 2, "answer_tokens_mean": 170 / 5, "answer_tokens_max": 90, "truncated_fraction": 2 / 4,
    }  # fmt: skip
    assert Drop(3, "sequence 1 has 70 tokens, more than row_length 64", "too_long", 50) in manifest.drops


def test_the_programs_own_metrics_are_averaged_over_who_has_them() -> None:
    assert client([{"a": 1.0, "b": 2.0}, {"a": 4.0}]) == {"client/a": 2.5, "client/b": 2.0}
    assert client([{"a": 1.5e308}, {"a": 1.5e308}]) == {"client/a": 1.5e308}
    many = client([{f"{number:03}": 1.0 for number in range(200)}, {"199": 1.0}])
    assert len(many) == CLIENT_NAMES + 1 and many["client_names_left_out"] == 200 - CLIENT_NAMES
    assert many["client/199"] == 1.0 and "client/100" not in many
    assert client([]) == {}


async def rollouts(ingest: Any, name: str, *rewards: float, **changes: Any) -> None:
    for number, reward in enumerate(rewards):
        await submit(ingest, group=name, key=f"{name}-{number}", reward=reward, **changes)


async def metrics_of(store: Any, step: int) -> dict[str, float]:
    rows = await store.read("SELECT name, value FROM metric WHERE step = ?", (step,))
    found = {row["name"]: row["value"] for row in rows}
    job = msgspec.json.decode(await one(store, "SELECT metrics FROM job WHERE state = 'succeeded' AND step = ?", step))
    assert job == found, "the job says something else"
    return found


@pytest.mark.asyncio
async def test_each_group_and_evaluation_is_told_by_one_step(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        assert await metrics_of(store, 0) == {"loss": 0.5}, "a step without rollouts tells of none"
        ingest = make_ingest(store, data)
        await rollouts(ingest, "all", 1.0, 1.0)
        await rollouts(ingest, "none", 0.0, 0.0)
        await rollouts(ingest, "half", 0.5, 0.5)
        await rollouts(ingest, "mixed", 0.0, 1.0, metrics={"turns": 3.0})
        await rollouts(ingest, "judged", 0.25, 0.75, 0.5, split="eval")
        await rollouts(ingest, "later", 1.0)  # still open
        assert await pack_next(store, data)
        await commit_next(store, data, metrics={"loss": 0.125})
        found = await metrics_of(store, 1)
        rewards = [1.0, 1.0, 0.0, 0.0, 0.5, 0.5, 0.0, 1.0]
        wanted = {
            "groups_sealed": 4, "groups_discarded": 3, "groups_all_best": 1, "groups_all_worst": 1,
            "sampled_trajectories": 8, "sampled_reward_mean": 0.5, "sampled_reward_std": statistics.pstdev(rewards),
            "discarded_reward_mean": 0.5, "eval_trajectories": 3, "eval_reward_mean": 0.5, "trained_trajectories": 2,
            "client/turns": 3.0, "answer_tokens_max": 2, "loss": 0.125,
        }  # fmt: skip
        assert {name: found[name] for name in wanted} == pytest.approx(wanted)
        await rollouts(ingest, "again", 0.0, 1.0)
        assert await pack_next(store, data)
        await commit_next(store, data)
        found = await metrics_of(store, 2)
        assert (found["groups_sealed"], found["sampled_trajectories"]) == (1, 2) and "eval_trajectories" not in found


@pytest.mark.asyncio
async def test_a_trajectory_that_lost_a_sequence_says_so(tmp_path: Path) -> None:
    """And goes on saying so when it is trained."""
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        ingest = make_ingest(store, data)
        long = turn(prompt_ids=ids(9, 9), token_ids=ids(*[3] * 70), logprobs=floats(*[-0.5] * 70))
        await submit(ingest, key="a", reward=1.0, turns=(turn(), long))
        await submit(ingest, key="b", reward=0.0)
        assert await pack_next(store, data)
        await commit_next(store, data)
        shown = await read_rows(store, api.List(what="trajectories", run="r"))
        assert {(row["key"], row["state"], row["reason"]) for row in shown.rows} == {
            ("a", "trained", "trained without a part of it: sequence 1 has 72 tokens, more than row_length 64"),
            ("b", "trained", ""),
        }
        found = await metrics_of(store, 1)
        assert (found["shortened_trajectories"], found["dropped_tokens"]) == (1, 70)
