"""references and the ledger on a real store: what a response's turn becomes, and where it is held."""

from __future__ import annotations

import sqlite3
import threading

import msgspec
import pytest

from artd.errors import Conflict, Invalid, NotFound, RequestError
from artd_schema.codec import digest
from artd_schema.data.trajectory import Turn
from artd_schema.wire import worker as w
from tests.fakes.rows import (
    WHOLE,
    add_run,
    body,
    body_of,
    by_reference,
    count,
    data_dir,
    exchange,
    ids,
    make_ingest,
    one,
    open_store,
    refused,
    submit,
    turn,
)

pytestmark = pytest.mark.asyncio


async def test_by_reference_takes_the_turns_of_the_ledger(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        turns = [turn(token_ids=ids(i, i), policy_epoch=((0, 0),)) for i in (5, 6)]
        assert await exchange(ingest, "one", turns=turns) == w.ExchangeAck(response_id="one")
        await exchange(ingest, "two")
        answer = await ingest.submit(by_reference(("one", 1), ("two", 0)), [])
        (row,) = await store.read(WHOLE)
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
        (row,) = await store.read(WHOLE)
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
    ("harm", "code"),
    [(lambda path: path.unlink(), "busy"), (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"z"), "failed")],
)
async def test_a_damaged_file_of_the_ledger_is_refused_by_name(tmp_path, harm, code):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        ingest = make_ingest(store, data, max_inline=100)
        await exchange(ingest, "big", turns=[turn(raw=b"x" * 300)])
        (path,) = data.blobs.glob("*/*")
        harm(path)
        with pytest.raises(RequestError, match=f"response 'big' choice 0: the ledger's file {path}") as caught:
            await ingest.submit(by_reference(("big", 0)), [])
        assert caught.value.code == code, "what cannot be read now may be read later"
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
