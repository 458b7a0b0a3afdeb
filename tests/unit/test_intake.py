"""intake: a batch does what the same parcels would do one by one, and one that breaks it harms nobody else."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading

import msgspec
import pytest

from artd.errors import RequestError
from artd.rollouts import insert
from artd.rollouts.insert import Intake, Parcel, RunFacts, insert_many
from artd.store.store import set_meta
from artd.store.writer import StoreFull
from artd_schema.wire import client_api as api
from tests.fakes.rows import FakeClock, add_run, body, count, open_store, spec, turn

pytestmark = pytest.mark.asyncio
RUN = RunFacts(1, spec(group_size=3), 100)
TABLES = ("trajectory", "trajectory_group", "event", "blob")


def parcel(key, group="g", reward=0.0, split="train", content=None, blob=None, run=RUN):
    op = api.Submit(run="r", group=group, reward=reward, key=key, split=split)
    data = body(turn(raw=key.encode()))
    return Parcel(op, run, key, content or f"{key}{group}{reward}{split}", "d", None if blob else data, blob, len(data), 2,
                  (None, None), b"{}")  # fmt: skip


def random_parcels(seed: int) -> list[Parcel]:
    """Duplicates, conflicts, groups that fill up in the middle, wrong splits, groups without variance."""
    rng = random.Random(seed)
    return [
        parcel(
            f"k{rng.randrange(30)}",
            group=f"g{rng.randrange(6)}",
            reward=float(rng.randrange(2)),
            split=rng.choice(["train"] * 5 + ["eval"]),
            blob=rng.choice([None, None, None, "sha1", "sha2"]),
        )
        for _ in range(60)
    ]


def plain(outcome) -> tuple:
    if isinstance(outcome, RequestError):
        return (outcome.code, outcome.field, outcome.message)
    return (outcome.trajectory, outcome.duplicate, outcome.group_state)


async def result_of(path, parcels, sizes) -> tuple[list[tuple], dict[str, list[tuple]]]:
    """Outcomes and tables after inserting in batches of these sizes."""
    path.mkdir()
    async with open_store(path, FakeClock()) as store:
        await add_run(store, group_size=3)
        outcomes, left = [], list(parcels)
        for size in sizes:
            part, left = left[:size], left[size:]
            if part:
                outcomes += await store.write(lambda c, part=part: insert_many(c, 1, part))
        tables = {name: sorted(tuple(row) for row in await store.read(f"SELECT * FROM {name}")) for name in TABLES[:2]}
        events = await store.read("SELECT kind, ref, data FROM event WHERE kind <> 'run.created'")
        tables["event"] = sorted(tuple(row) for row in events if row["kind"] != "trajectory.submitted")
        told = [msgspec.json.decode(row["data"]) for row in events if row["kind"] == "trajectory.submitted"]
        assert sum(each["count"] for each in told) == len(tables["trajectory"]) and all(each["groups"] for each in told)
        assert len(told) < len(tables["trajectory"]) or max(sizes) == 1, "one event tells of many"
        tables["blob"] = sorted(tuple(row) for row in await store.read("SELECT sha FROM blob"))
        return [plain(outcome) for outcome in outcomes], tables


@pytest.mark.parametrize("seed", range(12))
async def test_a_batch_is_as_good_as_one_by_one(tmp_path, seed):
    parcels = random_parcels(seed)
    alone = await result_of(tmp_path / "alone", parcels, [1] * 60)
    assert any(code == "conflict" for code, *_ in alone[0]) and any(state == "sealed" for *_, state in alone[0])
    for name, sizes in (("all", [60]), ("some", [7] * 9)):
        assert await result_of(tmp_path / name, parcels, sizes) == alone


async def test_a_batch_larger_than_a_lookup(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        parcels = [parcel(f"k{number}", group=f"g{number}") for number in range(2 * insert.LOOKUP + 7)]
        for duplicate in (False, True):
            outcomes = await store.write(lambda c: insert_many(c, 1, parcels))
            assert [repeated for _, repeated, _ in map(plain, outcomes)] == [duplicate] * len(parcels)
        assert await count(store, "trajectory") == len(parcels)


async def put_all(queue, parcels):
    """What each was answered."""
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in parcels]
    for each, future in zip(parcels, futures, strict=True):
        queue.put(each, future.set_result)
    return await asyncio.wait_for(asyncio.gather(*futures), 10)


async def test_what_waits_goes_together_and_every_answer_to_its_own(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        queue = Intake(store)
        _, before = store.commits
        answers = await put_all(queue, [parcel(f"k{number}", group=f"g{number}") for number in range(200)])
        assert [a.trajectory for a in answers] == list(range(1, 201))
        assert store.commits[1] - before <= 10
        assert await count(store, "trajectory", "key = 'k7' AND id = 8") == 1


async def test_one_that_breaks_its_batch_fails_alone(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        broken = parcel("broken", group="other")._replace(tokens=None)  # NOT NULL: only SQLite finds out
        answers = await put_all(Intake(store), [parcel("a"), broken, parcel("b")])
        assert isinstance(answers[1], sqlite3.IntegrityError)
        assert [a.group_state for a in (answers[0], answers[2])] == ["open", "open"]
        assert await count(store, "trajectory") == 2 and await count(store, "trajectory_group") == 1


async def test_a_full_disk_is_told_to_everyone(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        await store.write(lambda c: c.execute("PRAGMA max_page_count = 1").fetchone()[0])
        large = [parcel(f"k{n}")._replace(body=b"x" * 200_000) for n in range(3)]
        answers = await put_all(Intake(store), large)
        assert all(isinstance(answer, StoreFull) for answer in answers) and await count(store, "trajectory") == 0


async def test_a_full_disk_before_its_turn_is_told_too_and_what_comes_later_is_taken(tmp_path):
    """SQLite takes a whole group back when one write finds no room: the intake's, behind it, never began."""
    async with open_store(tmp_path) as store:
        await add_run(store)
        await store.write(lambda c: c.execute("PRAGMA max_page_count = 1").fetchone()[0])
        queue, entered, opened = Intake(store), threading.Event(), threading.Event()
        gate = store.submit(lambda c: entered.set() or opened.wait(60))
        assert await asyncio.to_thread(entered.wait, 60)
        large = store.submit(lambda c: set_meta(c, "large", "x" * 1_000_000))
        answers = asyncio.ensure_future(put_all(queue, [parcel("a"), parcel("b")]))
        await asyncio.sleep(0.01)  # both are with the writer now
        opened.set()
        assert await gate and isinstance((await asyncio.gather(large, return_exceptions=True))[0], StoreFull)
        assert all(isinstance(answer, StoreFull) for answer in await answers)
        await store.write(lambda c: c.execute(f"PRAGMA max_page_count = {1 << 30}").fetchone()[0])
        assert [a.trajectory for a in await put_all(queue, [parcel("c"), parcel("d")])] == [1, 2]


async def test_an_unknown_run_in_a_batch_harms_nobody_else(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        gone = RUN._replace(id=99)
        answers = await put_all(Intake(store), [parcel("a"), parcel("b", run=gone), parcel("c")])
        assert isinstance(answers[1], Exception) and answers[0].trajectory and answers[2].trajectory
