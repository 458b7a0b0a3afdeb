"""ingest of a mixture of experts: routes come to their row whole, each token's once, or the trajectory is refused."""

from __future__ import annotations

import threading

import msgspec
import pytest

from artd.errors import Conflict, Invalid
from artd.rollouts import ingest as ingest_module
from artd_client import turn as client_turn
from artd_schema.codec import digest
from artd_schema.data.base import BaseModel
from artd_schema.data.trajectory import ExchangeRef, Sampling, Turn
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.fakes.routes import SHAPE, layer_rows, put, rows_of
from tests.fakes.rows import (
    VOCAB,
    WHOLE,
    add_run,
    body,
    body_of,
    count,
    data_dir,
    make_ingest,
    one,
    open_store,
    refused,
    submit,
)

pytestmark = pytest.mark.asyncio
MOE = BaseModel("b" * 64, VOCAB, (), SHAPE)
FIRST = ([1, 2, 3], [4, 5])
SECOND = ([1, 2, 3, 4, 5, 6], [7, 8])


async def add_moe_run(store, **changes):
    await add_run(store, base=MOE, group_size=4, **changes)


def turn(prompt, sampled, start=0, salt=0, **more) -> Turn:
    rows = rows_of(SHAPE, start, len(prompt) + len(sampled) - 1 - start, salt)
    return client_turn(prompt, sampled, [-1.0] * len(sampled), **({"routes": rows, "routes_start": start} | more))


async def record(ingest, name, *turns, split="train"):
    """Write one response to the ledger."""
    stamped = [msgspec.structs.replace(t, policy_epoch=((0, 0),), kv_cache_epoch=((0, 0),)) for t in turns]
    message = w.Exchange(response_id=name, run="r", model="r@0", split=split, sampling=Sampling(), choices=len(turns),
                         prompt_tokens=1, completion_tokens=1, seconds=0.1)  # fmt: skip
    assert (await ingest.exchange(message, [msgspec.msgpack.encode(t) for t in stamped])).error == ""


def refer(*names, split="train", **changes):
    refs = tuple(ExchangeRef(name, 0) for name in names)
    return api.Submit(run="r", group="g", reward=1.0, refs=refs, split=split, **changes)


async def stored(store, data) -> list[Turn]:
    """The turns of the only trajectory, by its row."""
    (row,) = await store.read(WHOLE)
    found = body_of(row, data)
    assert digest(found) == row["digest"]
    return msgspec.msgpack.decode(found, type=list[Turn])


@pytest.mark.parametrize("max_inline", [65536, 64])
async def test_by_value_what_was_given_lies_in_the_row(tmp_path, max_inline):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline)
        given = rows_of(SHAPE, 0, 4)
        turns = (
            client_turn(*FIRST, [-1.0, -2.0], routes=layer_rows(SHAPE, given), experts=SHAPE.experts),
            turn(*SECOND, start=4, salt=1),
        )
        await submit(ingest, turns=turns)
        assert await stored(store, data) == list(turns)
        assert (turns[0].routes, turns[0].routes_start) == (given, 0)
        assert (await store.read("SELECT blob IS NULL FROM trajectory"))[0][0] == (max_inline == 65536)


@pytest.mark.parametrize("max_inline", [65536, 64])
async def test_by_reference_each_token_has_its_routes_once(tmp_path, max_inline):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline)
        third = ([*SECOND[0], *SECOND[1], 9], [1])
        await record(ingest, "a", turn(*FIRST))
        await record(ingest, "b", turn(*SECOND, salt=1))
        await record(ingest, "c", turn(*third, salt=2))
        await ingest.submit(refer("a", "b", "c"), [])
        found = [(each.routes, each.routes_start) for each in await stored(store, data)]
        assert found == [
            (rows_of(SHAPE, 0, 4), 0),
            (rows_of(SHAPE, 4, 3, 1), 4),
            (rows_of(SHAPE, 7, 2, 2), 7),
        ]
        assert len(b"".join(rows for rows, _ in found)) == 9 * SHAPE.row_bytes


@pytest.mark.parametrize("max_inline", [65536, 64])
@pytest.mark.parametrize("by", ["value", "reference"])
async def test_a_token_without_routes_refuses_the_trajectory_and_leaves_nothing(tmp_path, by, max_inline):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        ingest = make_ingest(store, data_dir(tmp_path), max_inline)
        turns = (turn(*FIRST), turn(*SECOND, start=5))
        if by == "value":
            await refused(Invalid, "turns[1].routes[4]", "expert_replay=false", submit(ingest, turns=turns))
        else:
            await record(ingest, "a", turns[0])
            await record(ingest, "b", turns[1])
            await refused(Invalid, "turns[1].routes[4]", "expert_replay=false", ingest.submit(refer("a", "b"), []))
            assert await count(store, "exchange", "trajectory_id IS NULL") == 2
        assert await count(store, "trajectory") == await count(store, "trajectory_group") == 0


@pytest.mark.parametrize("fast", [True, False])
async def test_bad_ids_are_refused_on_both_ways_in(tmp_path, fast):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await ingest.facts("r")
        bad = turn(*FIRST, routes=put(SHAPE, rows_of(SHAPE, 0, 4), 2, 1, 0, 8))
        op = api.Submit(run="r", group="g", reward=1.0)

        async def send():
            return ingest.submit_now(op, [body(bad)], print) if fast else await ingest.submit(op, [body(bad)])

        await refused(Invalid, "turns[0].routes[2]", "expert id 8", send())


async def test_without_any_routes_a_train_trajectory_is_told_what_to_do(tmp_path):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        none = turn(*FIRST, routes=b"")
        await refused(Invalid, "turns[0].routes[0]", "by reference", submit(ingest, turns=(none,)))
        await submit(ingest, turns=(none,), split="eval")
        await record(ingest, "e", none, split="eval")
        await ingest.submit(refer("e", split="eval"), [])
        assert await count(store, "trajectory", "split = 'eval'") == 2


async def test_eval_keeps_the_routes_that_it_has_and_has_them_checked(tmp_path):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        await refused(Invalid, "turns[0].routes", "3 rows", submit(
            ingest, turns=(turn(*FIRST, routes=rows_of(SHAPE, 0, 3)),), split="eval"))  # fmt: skip
        await record(ingest, "e", turn(*FIRST), split="eval")
        await ingest.submit(refer("e", split="eval"), [])
        assert (await stored(store, data))[0].routes == rows_of(SHAPE, 0, 4)


async def test_expert_replay_off_takes_none(tmp_path):
    async with open_store(tmp_path) as store:
        await add_moe_run(store, expert_replay=False)
        ingest = make_ingest(store, data_dir(tmp_path))
        assert await one(store, "SELECT routes FROM run") == b""
        await refused(Invalid, "turns[0].routes", "expert_replay=false", submit(ingest, turns=(turn(*FIRST),)))
        await submit(ingest, turns=(turn(*FIRST, routes=b""),))


@pytest.mark.parametrize("by", ["value", "reference"])
async def test_large_bodies_are_checked_neither_in_the_event_loop_nor_in_the_writer(tmp_path, by, monkeypatch):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        ingest = make_ingest(store, data_dir(tmp_path), max_inline=100)
        seen = []
        module = ingest_module if by == "value" else ingest_module.by_reference
        check = module.check_turns
        monkeypatch.setattr(
            module, "check_turns", lambda *given: (seen.append(threading.current_thread()), check(*given))[1]
        )
        if by == "value":
            await submit(ingest, turns=(turn(*FIRST),))
        else:
            await record(ingest, "a", turn(*FIRST))
            await ingest.submit(refer("a"), [])
        (thread,) = seen
        assert thread is not threading.main_thread() and thread is not store._writer._thread


def submitted_meanwhile(ingest, monkeypatch, key):
    """Have another submit of response "a" come, with this key, while the next one has read the ledger but not written."""
    read = ingest_module.by_reference.read_exchanges

    async def meanwhile(*given):
        found = await read(*given)
        monkeypatch.setattr(ingest_module.by_reference, "read_exchanges", read)
        await ingest.submit(refer("a", key=key), [])
        return found

    monkeypatch.setattr(ingest_module.by_reference, "read_exchanges", meanwhile)


async def test_of_two_submits_at_once_one_gets_the_response(tmp_path, monkeypatch):
    """Both read it while it is unused; the writer decides."""
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await record(ingest, "a", turn(*FIRST))
        submitted_meanwhile(ingest, monkeypatch, "quick")
        await refused(Conflict, "refs[0]", "part of trajectory 1 already", ingest.submit(refer("a", key="slow"), []))
        assert await count(store, "trajectory") == 1


async def test_the_same_submit_twice_at_once_is_one_trajectory(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await record(ingest, "a", turn(*FIRST))
        submitted_meanwhile(ingest, monkeypatch, "k")
        answer = await ingest.submit(refer("a", key="k"), [])
        assert (answer.trajectory, answer.duplicate) == (1, True) and await count(store, "trajectory") == 1


async def test_many_references_are_read_at_once_and_stay_in_order(tmp_path):
    async with open_store(tmp_path) as store:
        await add_moe_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data)
        names = [f"n{number:04}" for number in range(700)]
        for number, name in enumerate(names):
            await record(ingest, name, turn([number % VOCAB, 2], [3]))
        order = names[::-1]
        await ingest.submit(refer(*order), [])
        assert [each.prompt_ids[0] for each in await stored(store, data)] == [int(n[1:]) % VOCAB for n in order]
        plan = await store.read(
            "EXPLAIN QUERY PLAN " + ingest_module.by_reference.READ.format("(?, ?), (?, ?)"), ("a", 0, "b", 0, 1)
        )
        assert any("run_id=? AND response_id=? AND choice=?" in row["detail"] for row in plan), [
            row["detail"] for row in plan
        ]
