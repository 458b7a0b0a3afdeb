"""ingest on a real store: by value, by reference, duplicates, seals and the ledger."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import msgspec
import pytest

from artd.errors import Conflict, Invalid, NotFound, RequestError
from artd.runs import set_run_state
from artd_schema import client_api as api
from artd_schema import worker as w
from artd_schema.codec import digest
from artd_schema.trajectory import ExchangeRef, Sampling, Turn
from tests.fakes.rows import (
    VOCAB,
    FakeClock,
    add_run,
    body,
    body_of,
    count,
    data_dir,
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


async def exchange(ingest, response_id="resp-1", split="train", turns=None, **changes):
    turns = turns or [turn(policy_epoch=((0, 0),), response_id=response_id)]
    fields = {
        "response_id": response_id, "run": "r", "model": "r@0", "split": split, "sampling": Sampling(),
        "choices": len(turns), "prompt_tokens": 2, "completion_tokens": 2, "seconds": 0.1,
    }  # fmt: skip
    return await ingest.exchange(w.Exchange(**(fields | changes)), [msgspec.msgpack.encode(t) for t in turns])


def by_reference(*refs, group="g", reward=1.0, **changes):
    return api.Submit(run="r", group=group, reward=reward, refs=tuple(ExchangeRef(*ref) for ref in refs), **changes)


async def test_a_trajectory_is_stored_whole(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        turns = (turn(policy_epoch=((0, 3),)), turn(policy_epoch=((0, 5),)))
        answer = await submit(ingest, turns=turns, key="k", metrics={"a": 1.5}, metadata={"b": [1]})
        assert answer == api.Submitted(trajectory=answer.trajectory, duplicate=False, group_state="open")
        (row,) = await store.read("SELECT * FROM trajectory")
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
        (row,) = await store.read("SELECT body, blob, payload FROM trajectory")
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
        ("reward", "nan is not finite", {"reward": float("nan")}),
        ("reward", "inf is not finite", {"reward": float("inf")}),
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
        await refused(Invalid, "turns", "list[Turn]", ingest.submit(op, [junk]))
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
        await asyncio.sleep(0.7)
        assert await one(store, "SELECT state FROM trajectory_group WHERE name = 'g'") == "sealed"
        assert await one(store, "SELECT state FROM trajectory_group WHERE name = 'young'") == "open"
        await settle(task)


async def test_by_reference_takes_the_turns_of_the_ledger(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        turns = [turn(token_ids=ids(i, i), policy_epoch=((0, 0),)) for i in (5, 6)]
        assert await exchange(ingest, "one", turns=turns) == w.ExchangeAck(response_id="one")
        await exchange(ingest, "two")
        answer = await ingest.submit(by_reference(("one", 1), ("two", 0)), [])
        (row,) = await store.read("SELECT * FROM trajectory")
        stored = msgspec.msgpack.decode(row["body"], type=list[Turn])
        assert [t.token_ids for t in stored] == [ids(6, 6), ids(3, 4)] and row["epoch_max"] == 0
        used = await store.read("SELECT choice, trajectory_id FROM exchange ORDER BY response_id, choice")
        assert [tuple(r) for r in used] == [(0, None), (1, answer.trajectory), (0, answer.trajectory)]


async def test_references_that_cannot_be_taken(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=4)
        ingest = make_ingest(store, data_dir(tmp_path))
        for name in ("one", "two"):
            await exchange(ingest, name)
        await exchange(ingest, "eval", split="eval")
        known, unknown = ("one", 0), ("nope", 0)
        await refused(NotFound, "refs[1]", "no response 'nope'", ingest.submit(by_reference(known, unknown), []))
        await refused(NotFound, "refs[0]", "choice 7", ingest.submit(by_reference(("one", 7)), []))
        await refused(Conflict, "refs[0]", "split 'eval', not 'train'", ingest.submit(by_reference(("eval", 0)), []))
        await refused(Conflict, "refs[1]", "twice", ingest.submit(by_reference(known, known), []))
        await refused(Invalid, "refs", "not both", ingest.submit(by_reference(known), [body()]))
        assert await count(store, "trajectory") == 0
        first = await ingest.submit(by_reference(known), [])
        text = f"part of trajectory {first.trajectory} already"
        await refused(Conflict, "refs[1]", text, ingest.submit(by_reference(("two", 0), known), []))
        assert await count(store, "exchange", "response_id = 'two' AND trajectory_id IS NULL") == 1
        again = await ingest.submit(by_reference(known), [])
        assert again.duplicate and again.trajectory == first.trajectory
        await refused(Conflict, "key", "other content", ingest.submit(by_reference(known, reward=0.0), []))


async def test_epochs_of_the_ledger_must_be_known_to_the_run(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await exchange(ingest, "future", turns=[turn(policy_epoch=((0, 1),))])
        op = by_reference(("future", 0))
        await refused(Invalid, "turns[0].policy_epoch", "epoch 1 was never served", ingest.submit(op, []))


async def test_a_large_body_by_reference_is_a_file(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline=100)
        await exchange(ingest, "big", turns=[turn(raw=b"x" * 300)])
        await ingest.submit(by_reference(("big", 0)), [])
        sha = await one(store, "SELECT blob FROM trajectory")
        assert (data.blobs / sha[:2] / sha).stat().st_size > 300


async def test_the_ledger_takes_a_response_once(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        assert (await exchange(ingest)).error == "" == (await exchange(ingest)).error
        assert await count(store, "exchange") == 1
        answer = await exchange(ingest, "other", choices=3)
        assert answer.error == "1 turns for 3 choices" and await count(store, "exchange") == 1
        with pytest.raises(NotFound):
            await exchange(ingest, run="nope")


async def held(store):
    """Of each choice in the ledger: (bytes in its row, name of its file)."""
    return [tuple(r) for r in await store.read("SELECT length(turn), blob FROM exchange ORDER BY response_id, choice")]


async def test_large_turns_of_the_ledger_are_files_and_small_ones_are_not(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline=400)
        put, threads = ingest._blobs.put, []
        monkeypatch.setattr(
            ingest._blobs, "put", lambda turn: (threads.append(threading.current_thread()), put(turn))[1]
        )
        turns = [turn(choice=0), turn(choice=1, raw=b"x" * 400), turn(choice=2, raw=b"y" * 400)]
        raw = [msgspec.msgpack.encode(t) for t in turns]
        assert len(raw[0]) <= 400
        assert (await exchange(ingest, turns=turns)).error == "" == (await exchange(ingest, turns=turns)).error
        assert await held(store) == [(len(raw[0]), None), (None, digest(raw[1])), (None, digest(raw[2]))]
        assert await count(store, "blob", "kind = 'exchange'") == await count(store, "blob") == 2
        assert {path.read_bytes() for path in data.blobs.glob("*/*")} == set(raw[1:])
        assert not {threading.main_thread(), store._writer._thread} & set(threads)


@pytest.mark.parametrize("max_inline", [65536, 100])
async def test_a_used_turn_is_held_by_its_trajectory_alone(tmp_path, max_inline):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline)
        turns = [turn(choice=i, raw=b"x" * 300, policy_epoch=((0, 0),)) for i in range(2)]
        await exchange(ingest, "one", turns=turns)
        first = await ingest.submit(by_reference(("one", 1)), [])
        (row,) = await store.read("SELECT body, blob, digest FROM trajectory")
        stored = body_of(row, data)
        assert (
            stored == body(turns[1]) and digest(stored) == row["digest"] and (row["blob"] is None) == (max_inline > 100)
        )
        unused, used = await held(store)
        assert used == (None, None) != unused
        assert await ingest.submit(by_reference(("one", 1)), []) == msgspec.structs.replace(first, duplicate=True)
        text = f"part of trajectory {first.trajectory} already"
        await refused(Conflict, "refs[0]", text, ingest.submit(by_reference(("one", 1), key="other"), []))


@pytest.mark.parametrize(
    "harm", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1] + b"z")]
)
async def test_a_damaged_file_of_the_ledger_is_refused_by_name(tmp_path, harm):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline=100)
        await exchange(ingest, "big", turns=[turn(raw=b"x" * 300)])
        (path,) = data.blobs.glob("*/*")
        harm(path)
        await refused(RequestError, "", f"response 'big' choice 0: the ledger's file {path}",
                      ingest.submit(by_reference(("big", 0)), []))  # fmt: skip
        assert await count(store, "trajectory") == 0 and await count(store, "exchange", "trajectory_id IS NULL") == 1


@pytest.mark.parametrize("values", ["NULL, NULL, NULL", "x'00', 'sha', NULL", "x'00', NULL, 1", "NULL, 'sha', 1"])
async def test_a_choice_is_held_in_one_place(tmp_path, values):
    """By its row or its file while it is unused, then by its trajectory."""
    async with open_store(tmp_path) as store:
        await add_run(store)
        await submit(make_ingest(store, data_dir(tmp_path)))
        write = "INSERT INTO exchange (run_id, response_id, choice, model, split, turn, blob, trajectory_id, created) VALUES"
        await store.write(lambda c: c.execute("INSERT INTO blob VALUES ('sha', 1, 'exchange', 0)"))
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            await store.write(lambda c: c.execute(f"{write} (1, 'a', 0, 'm', 'train', {values}, 0)"))
