"""Rollouts by name on a real store: order, states, expiry, and what a submission takes."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from artd.config import Retention
from artd.errors import Conflict, Invalid, NotFound
from artd.retention import collector
from artd.retention.collector import DAY_MS, Collector
from artd.rollouts import by_name
from artd.rollouts.deliveries import Deliveries
from artd.store.blobs import Blobs
from artd.tables.exchanges import SPAWN_BITS
from artd_schema.data.trajectory import Credit, Turn
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.deliveries import Delivery, Recall, Recalled
from artd_workers.gateway.request import asked
from tests.awake import until
from tests.fakes.rows import (
    WHOLE,
    FakeClock,
    add_run,
    body_of,
    count,
    data_dir,
    exchange,
    ids,
    make_ingest,
    one,
    open_store,
    refused,
    turn,
)

pytestmark = pytest.mark.asyncio


async def test_daemon_and_gateway_agree_on_places() -> None:
    assert asked.SPAWN_BITS == SPAWN_BITS


async def say(ingest, name, place, rollout="t", **changes):
    """One response whose only sampled token is its place."""
    made = turn(token_ids=ids(place % 100), logprobs=turn().logprobs[:4], response_id=name, policy_epoch=((0, 0),))
    fields = {"rollout": rollout, "place": place, "request": name} | changes
    return await exchange(ingest, name, turns=[made], **fields)


def by_rollout(name="t", group="g", **changes):
    return api.Submit(run="r", group=group, reward=1.0, rollout=name, **changes)


async def tokens_of(store, data):
    """The sampled tokens of each trajectory."""
    rows = await store.read(WHOLE)
    return [[t.token_ids[0] for t in msgspec.msgpack.decode(body_of(row, data), type=list[Turn])] for row in rows]


async def deliveries(store):
    return {row[0]: row[1] for row in await store.read("SELECT response_id, delivery FROM exchange")}


@pytest.mark.parametrize("max_inline", [65536, 10])
async def test_a_rollout_is_one_trajectory_in_the_order_of_its_requests(tmp_path, max_inline):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline)
        later = 1 << SPAWN_BITS  # a gateway that was started after the first one's end
        for name, place in (("c", 3), ("a", 1), ("d", later + 26), ("b", 2)):
            assert (await say(ingest, name, place)).error == ""
        await say(ingest, "other", 9, rollout="u")
        await exchange(ingest, "nobody's")
        answer = await ingest.submit(by_rollout(), [])
        assert await tokens_of(store, data) == [[1, 2, 3, 2]]
        assert await one(store, "SELECT trajectory_id FROM rollout WHERE name = 't'") == answer.trajectory
        assert await count(store, "exchange", "trajectory_id IS NULL") == 2
        again = await ingest.submit(by_rollout(), [])
        assert again == msgspec.structs.replace(answer, duplicate=True)
        await refused(Conflict, "key", "other content", ingest.submit(by_rollout(group="other"), []))
        late = by_rollout(key="late")
        await refused(Conflict, "rollout", f"is trajectory {answer.trajectory} already", ingest.submit(late, []))
        with pytest.raises(Conflict, match="take another name"):
            await say(ingest, "late", 9)


async def test_what_a_submission_leaves_out(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        notes = Deliveries(store, ingest, Blobs(data.blobs))
        for place, name in enumerate(("whole", "doubt", "gone"), 1):
            await say(ingest, name, place)
        await say(ingest, "part", 4, part=True)
        await say(ingest, "judge", 5, split="eval")
        await notes.note(Delivery(run="r", response_id="whole", whole=True))
        await notes.note(Delivery(run="r", response_id="gone", whole=False))
        await notes.note(Delivery(run="r", response_id="part", whole=True))  # once superseded, for ever
        await notes.note(Delivery(run="r", response_id="nobody", whole=True))
        await ingest.submit(by_rollout(), [])
        assert await tokens_of(store, data) == [[1, 2]]
        assert await deliveries(store) == {
            "whole": "delivered", "doubt": "pending", "gone": "superseded", "part": "superseded", "judge": "pending",
        }  # fmt: skip
        await refused(NotFound, "rollout", "no rollout 'none'", ingest.submit(by_rollout("none"), []))
        await say(ingest, "only", 1, rollout="e", split="eval")
        await refused(Conflict, "rollout", "no response of split 'train'", ingest.submit(by_rollout("e"), []))
        assert (await ingest.submit(by_rollout("e", group="held", split="eval"), [])).trajectory == 2
        both = msgspec.structs.replace(by_rollout("e"), refs=(api.ExchangeRef("only"),))
        await refused(Invalid, "refs", "not both", ingest.submit(both, []))


async def test_one_credit_stands_for_all_turns(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        for place in (1, 2):
            await say(ingest, f"{place}", place)
        await ingest.submit(by_rollout(credits=(Credit(weights=(0.5,)),)), [])
        (row,) = await store.read(WHOLE)
        turns = msgspec.msgpack.decode(body_of(row, data), type=list[Turn])
        assert [len(t.weights) for t in turns] == [4, 4]


async def test_a_response_that_comes_meanwhile_is_in_the_trajectory(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        await say(ingest, "a", 1)
        read, late = by_name.read_responses, [2, 3, 4, 5]

        async def and_one_more(*args):
            found = await read(*args)
            if late:
                await say(ingest, f"{late[0]}", late.pop(0))
            return found

        monkeypatch.setattr(by_name, "read_responses", and_one_more)
        await refused(by_name.Changed, "", "gets responses all the time", ingest.submit(by_rollout(), []))
        await ingest.submit(by_rollout(), [])
        assert await tokens_of(store, data) == [[1, 2, 3, 4, 5]]


async def test_an_undelivered_reply_is_recalled_and_superseded_by_what_was_asked_instead(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline=10)
        notes = Deliveries(store, ingest, Blobs(data.blobs))
        living = 2 << SPAWN_BITS

        async def recalled(request="x", rollout="t", run="r"):
            recall = Recall(number=7, run=run, rollout=rollout, request=request, place=living + 9)
            told, turns = await notes.recall(recall)
            assert told.number == 7 and len(turns) == bool(told.response_id)
            return told.response_id

        await say(ingest, "dead", living - 1, request="x")
        await say(ingest, "alive", living + 1, request="x")
        assert await deliveries(store) == {"dead": "superseded", "alive": "pending"}, "the gateway of the first is dead"
        assert await recalled() == "", "its reply is on its way"
        await notes.note(Delivery(run="r", response_id="alive", whole=False))
        assert await recalled() == "alive"
        assert [await recalled(request="y"), await recalled(rollout="u")] == ["", ""]
        with pytest.raises(NotFound):
            await recalled(run="gone")
        await notes.note(Delivery(run="r", response_id="alive", whole=True))
        assert await recalled() == "" and (await deliveries(store))["alive"] == "delivered"
        await say(ingest, "more", living + 2, request="x")
        assert (await deliveries(store))["alive"] == "delivered", "what a client had is superseded by nothing"
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(Recalled(number=1)), type=w.ToWorker) == Recalled(number=1)


async def test_a_reply_that_was_lost_and_sent_again_may_be_submitted_before_its_mark(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        notes = Deliveries(store, ingest, Blobs(data.blobs))
        await say(ingest, "again", 1, request="x")
        await notes.note(Delivery(run="r", response_id="again", whole=False))
        await refused(Conflict, "rollout", "all were lost", ingest.submit(by_rollout(), []))
        found, _ = await notes.recall(Recall(number=1, run="r", rollout="t", request="x", place=2))
        assert found.response_id == "again"
        assert (await ingest.submit(by_rollout(), [])).trajectory == 1
        await notes.note(Delivery(run="r", response_id="again", whole=True))
        assert await tokens_of(store, data) == [[1]] and await deliveries(store) == {"again": "delivered"}


async def test_a_mark_waits_for_the_turns_that_are_on_their_way_to_files(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline=10)
        notes = Deliveries(store, ingest, Blobs(data.blobs))
        monkeypatch.setattr(ingest, "exchange", notes.exchange)
        put, go_on = ingest._blobs.put, threading.Event()
        monkeypatch.setattr(ingest._blobs, "put", lambda turn: (go_on.wait(), put(turn))[1])
        monkeypatch.setattr(notes, "_ingest", make_ingest(store, data, max_inline=10))
        monkeypatch.setattr(notes._ingest, "_blobs", ingest._blobs)
        entering = asyncio.ensure_future(say(ingest, "a", 1))
        await until(lambda: notes._entering)
        noting = asyncio.ensure_future(notes.note(Delivery(run="r", response_id="a", whole=False)))
        await asyncio.sleep(0.05)
        assert not noting.done()
        go_on.set()
        await asyncio.gather(entering, noting)
        assert await deliveries(store) == {"a": "lost"} and not notes._entering


async def test_a_rollout_that_nobody_submits_expires_whole_and_says_so(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        collects = Collector(store, Blobs(data.blobs), Retention(exchanges_days=2.0))
        await say(ingest, "a", 1)
        await say(ingest, "old", 1, rollout="u")
        clock.advance(1.5 * DAY_MS / 1000)
        await say(ingest, "b", 2)
        clock.advance(1.0 * DAY_MS / 1000)
        done = await collects.collect()
        assert {(row["kind"], row["count"]) for row in done.rows()} == {("rollout", 1), ("exchange", 1)}
        assert set(await deliveries(store)) == {"a", "b"}, "an open rollout is kept whole"
        (told,) = await store.read("SELECT data FROM event WHERE kind = 'rollout.expired'")
        assert msgspec.json.decode(told[0]) == {"count": 1, "names": ["u"]}
        await refused(Conflict, "rollout", "rollout 'u' has expired", ingest.submit(by_rollout("u"), []))
        with pytest.raises(Conflict, match="take another name"):
            await say(ingest, "late", 9, rollout="u")
        await ingest.submit(by_rollout(), [])
        assert await tokens_of(store, data) == [[1, 2]]


async def test_a_ledger_over_its_size_expires_the_rollouts_that_it_breaks(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "ROWS", 1)
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        for place in (1, 2):
            await say(ingest, f"{place}", place)
        kept = await one(store, "SELECT bytes FROM exchange_count")
        await Collector(store, Blobs(data.blobs), Retention(exchanges_gib=(kept - 1) / 2**30)).collect()
        assert set(await deliveries(store)) == {"2"}
        await refused(Conflict, "rollout", "rollout 't' has expired", ingest.submit(by_rollout(), []))
