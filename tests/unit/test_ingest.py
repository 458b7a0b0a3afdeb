"""ingest on a real store: by value, duplicates and seals (by reference: test_references)."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from artd.errors import Conflict, Invalid, NotFound
from artd.rollouts import ingest as ingest_module
from artd.runs.lifecycle import set_run_state
from artd_schema.codec import digest
from artd_schema.data.trajectory import Sampling
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fakes.rows import (
    VOCAB,
    WHOLE,
    FakeClock,
    add_run,
    body,
    by_reference,
    count,
    data_dir,
    exchange,
    floats,
    ids,
    make_ingest,
    one,
    open_store,
    refused,
    settle,
    submit,
    turn,
)

pytestmark = pytest.mark.asyncio


@pytest.fixture
def clock():
    return FakeClock()


async def test_a_trajectory_is_stored_whole(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        turns = (turn(policy_epoch=((0, 3),)), turn(policy_epoch=((0, 5),)))
        answer = await submit(ingest, turns=turns, key="k", metrics={"a": 1.5}, metadata={"b": [1]})
        assert answer == api.Submitted(trajectory=answer.trajectory, duplicate=False, group_state="open")
        (row,) = await store.read(WHOLE)
        assert (row["tokens"], row["epoch_min"], row["epoch_max"], row["state"]) == (4, 3, 5, "queued")
        assert row["body"] == body(*turns) and row["digest"] == digest(row["body"]) and row["blob"] is None
        assert msgspec.json.decode(row["metrics"]) == {"metrics": {"a": 1.5}, "metadata": {"b": [1]}}
        assert await count(store, "event", "kind = 'trajectory.submitted'") == 1


async def test_a_large_body_is_a_file_and_a_refused_one_leaves_none(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline=100)
        bad = turn(raw=b"x" * 200, logprobs=floats(1.0, 1.0))
        with pytest.raises(Invalid):
            await submit(ingest, turns=(bad,))
        assert not list(data.blobs.rglob("*")), "a refused trajectory left a file"
        await submit(ingest, turns=(turn(raw=b"x" * 200),))
        (row,) = await store.read(WHOLE)
        stored = data.blobs / row["blob"][:2] / row["blob"]
        assert row["body"] is None and stored.read_bytes() == body(turn(raw=b"x" * 200))
        assert await one(store, "SELECT bytes FROM blob") == stored.stat().st_size


BAD_TURNS = [
    ("turns[0].logprobs", "1 values for 2 token ids", {"logprobs": floats(-1.0)}),
    ("turns[0].token_ids[1]", f"outside the vocabulary of {VOCAB}", {"token_ids": ids(1, VOCAB)}),
    ("turns[0].logprobs[0]", "nan", {"logprobs": floats(float("nan"), -1.0)}),
    ("turns[0].logprobs[1]", "0.25", {"logprobs": floats(-1.0, 0.25)}),
    ("turns[0].prompt_ids", "is empty", {"prompt_ids": b""}),
    ("turns[0].sampling.top_p", "truncates", {"sampling": Sampling(top_p=0.5)}),
    ("turns", "no turn has a sampled token", {"token_ids": b"", "logprobs": b""}),
]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("field", "text", "changes"), BAD_TURNS)
async def test_bad_turns_are_refused_and_leave_nothing(tmp_path, field, text, changes, fast):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await ingest.facts("r")
        op = api.Submit(run="r", group="g", reward=1.0)

        async def send():
            bulk = [body(turn(**changes))]
            return ingest.submit_now(op, bulk, print) if fast else await ingest.submit(op, bulk)

        await refused(Invalid, field, text, send())
        assert await count(store, "trajectory") == await count(store, "trajectory_group") == 0


@pytest.mark.parametrize(
    ("field", "text", "changes"),
    [
        ("reward", "nan is not a finite number from", {"reward": float("nan")}),
        ("reward", "inf is not a finite number from", {"reward": float("inf")}),
        ("group", "1 to 256", {"group": ""}),
        ("group", "1 to 256", {"group": "g" * 257}),
        ("key", "at most 256", {"key": "k" * 257}),
    ],
)
async def test_bad_headers(tmp_path, field, text, changes):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await refused(Invalid, field, text, submit(ingest, **changes))
        op = msgspec.structs.replace(by_reference(("resp-1",)), **changes)
        await exchange(ingest)
        await refused(Invalid, field, text, ingest.submit(op, []))


async def test_an_unknown_run_is_named(tmp_path):
    async with open_store(tmp_path) as store:
        ingest = make_ingest(store, data_dir(tmp_path))
        await refused(NotFound, "run", "there is no run 'r'", submit(ingest))
        assert ingest.submit_now(api.Submit(run="r", group="g", reward=0.0), [body()], print) is False


@pytest.mark.parametrize("bulk", [[], [body(), body()]])
async def test_by_value_has_one_frame(tmp_path, bulk):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        op = api.Submit(run="r", group="g", reward=0.0)
        await refused(Invalid, "turns", "one bulk frame", ingest.submit(op, bulk))


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\xc0", b"\x90\x90", msgspec.msgpack.encode([{"prompt_ids": 3}])])
async def test_a_body_that_is_no_list_of_turns(tmp_path, junk):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await ingest.facts("r")
        op = api.Submit(run="r", group="g", reward=0.0)
        with pytest.raises(Invalid, match=r"list\[Turn\]|turns\[0\].prompt_ids: Expected `bytes`"):
            await ingest.submit(op, [junk])
        with pytest.raises(Invalid):
            ingest.submit_now(op, [junk], print)


async def test_an_empty_list_of_turns(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        op = api.Submit(run="r", group="g", reward=0.0)
        await refused(Invalid, "turns", "at least one turn", ingest.submit(op, [b"\x90"]))


async def test_a_finished_run_takes_nothing(tmp_path):
    async with open_store(tmp_path) as store:
        run = await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await store.write(lambda c: set_run_state(c, 0, run, "finished", ""))
        await refused(Conflict, "run", "finished", submit(ingest))


async def test_the_same_key_and_content_is_the_same_trajectory(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=3)
        ingest = make_ingest(store, data_dir(tmp_path))
        first = await submit(ingest, key="a")
        again = await submit(ingest, key="a")
        assert (again.trajectory, again.duplicate) == (first.trajectory, True)
        assert await count(store, "trajectory") == 1
        assert await one(store, "SELECT size FROM trajectory_group") == 1


@pytest.mark.parametrize(
    "changes", [{"reward": 2.0}, {"group": "other"}, {"metrics": {"a": 1.0}}, {"metadata": {"a": 1}}, {"split": "eval"},
                {"turns": (turn(token_ids=ids(9, 9), raw=b"a"),)}],
)  # fmt: skip
async def test_the_same_key_with_other_content_is_a_conflict(tmp_path, changes):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=3)
        ingest = make_ingest(store, data_dir(tmp_path))
        first = await submit(ingest, key="a")
        text = f"key 'a' was used for trajectory {first.trajectory}"
        await refused(Conflict, "key", text, submit(ingest, key="a", **changes))
        assert await count(store, "trajectory") == 1


async def test_without_a_key_the_body_is_the_key(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=3)
        ingest = make_ingest(store, data_dir(tmp_path))
        first = await submit(ingest)
        assert (await submit(ingest)).duplicate
        assert await one(store, "SELECT key FROM trajectory") == digest(body(turn(raw=b"")))
        await refused(Conflict, "key", f"trajectory {first.trajectory}", submit(ingest, reward=0.0))


async def test_concurrent_duplicates_make_one_row(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=3)
        ingest = make_ingest(store, data_dir(tmp_path))
        answers = await asyncio.gather(*(submit(ingest, key="a") for _ in range(20)))
        assert len({a.trajectory for a in answers}) == 1 and sum(not a.duplicate for a in answers) == 1


async def test_a_duplicate_of_a_trajectory_in_a_closed_group_is_answered(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await submit(ingest, key="a", reward=0.0)
        await submit(ingest, key="b", reward=1.0)
        assert (await submit(ingest, key="a", reward=0.0)).group_state == "sealed"


async def test_a_group_seals_when_full(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        assert (await submit(ingest, key="a", reward=0.0)).group_state == "open"
        assert (await submit(ingest, key="b", reward=1.0)).group_state == "sealed"
        assert await count(store, "event", "kind = 'group.sealed'") == 1
        await refused(Conflict, "group", "is sealed and takes no more", submit(ingest, key="c"))


async def test_a_group_without_variance_is_discarded_with_its_trajectories(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await submit(ingest, key="a")
        assert (await submit(ingest, key="b")).group_state == "discarded"
        assert await count(store, "trajectory", "state = 'discarded' AND reason = 'zero_variance'") == 2
        assert await one(store, "SELECT reason FROM trajectory_group") == "zero_variance"


async def test_eval_groups_never_fill_and_are_never_discarded(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        for key in "abc":
            assert (await submit(ingest, key=key, split="eval")).group_state == "open"
        await refused(Conflict, "split", "is of split 'eval', not 'train'", submit(ingest, key="d"))
        info = await ingest.seal(api.Seal(run="r", group="g"))
        assert (info.state, info.size) == ("sealed", 3)
        assert await count(store, "trajectory", "state = 'queued'") == 3


async def test_eval_may_be_sampled_greedily(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        greedy = turn(sampling=Sampling(temperature=0.0))
        await submit(ingest, turns=(greedy,), split="eval")
        await refused(Invalid, "turns[0].sampling.temperature", "greedy", submit(ingest, turns=(greedy,), group="t"))


async def test_seal_by_hand_is_idempotent_and_tells_the_outcome(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=4)
        ingest = make_ingest(store, data_dir(tmp_path))
        await submit(ingest, key="a")
        info = await ingest.seal(api.Seal(run="r", group="g"))
        assert (info.state, info.size, info.reason) == ("discarded", 1, "single_trajectory")
        assert await ingest.seal(api.Seal(run="r", group="g")) == info
        await refused(NotFound, "group", "no group 'x'", ingest.seal(api.Seal(run="r", group="x")))
        await submit(ingest, key="b", group="h", reward=0.0)
        await submit(ingest, key="c", group="h", reward=1.0)
        assert (await ingest.seal(api.Seal(run="r", group="h"))).state == "sealed"


async def test_flush_seals_every_open_group(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=4)
        ingest = make_ingest(store, data_dir(tmp_path))
        for group in "gh":
            for reward in (0.0, 1.0):
                await submit(ingest, group=group, key=f"{group}{reward}", reward=reward)
        await ingest.flush(api.Flush(run="r"))
        assert await count(store, "trajectory_group", "state = 'sealed'") == 2
        assert await one(store, "SELECT flush FROM run") == 1


async def test_a_group_seals_at_its_deadline_and_not_before(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        await add_run(store, group_size=4, group_timeout_s=30.0)
        ingest = make_ingest(store, data_dir(tmp_path))
        await submit(ingest, key="a", reward=0.0)
        clock.advance(20)
        await submit(ingest, key="b", reward=1.0)
        await submit(ingest, key="c", group="young", reward=1.0)
        task = asyncio.ensure_future(ingest.run())
        clock.advance(9.9)
        await asyncio.sleep(0.7)
        assert await count(store, "trajectory_group", "state = 'open'") == 2
        clock.advance(0.2)
        await until(lambda: count(store, "trajectory_group", "name = 'g' AND state = 'sealed'"))
        assert await one(store, "SELECT state FROM trajectory_group WHERE name = 'young'") == "open"
        await settle(task)


@pytest.mark.parametrize("by", ["value", "reference"])
async def test_large_metadata_is_encoded_away_from_the_event_loop(tmp_path, monkeypatch, by):
    threads, check = [], ingest_module.check_header
    monkeypatch.setattr(
        ingest_module, "check_header", lambda op: (threads.append(threading.current_thread()), check(op))[1]
    )
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await exchange(ingest, "one")
        op = api.Submit(run="r", group="g", reward=1.0, metadata={"text": "x" * 100_000})
        if by == "reference":
            op = by_reference(("one", 0), metadata=op.metadata)
        await ingest.submit(op, [body()] if by == "value" else [], 100_100)
        assert len(threads) == 1 and threads[0] is not threading.current_thread()
        assert await one(store, "SELECT bytes FROM blob") > 100_000
