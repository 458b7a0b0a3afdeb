"""Many groups at once hold nobody up, and nothing that a finished run left is kept for ever."""

from __future__ import annotations

import asyncio

import pytest

from artd.api.job_orders import end_job
from artd.config import Retention
from artd.recover import interrupt
from artd.retention.collector import DAY_MS, Collector
from artd.rollouts import slices
from artd.rollouts.ingest import Ingest
from artd.runs.lifecycle import Runs
from artd.store.blobs import Blobs
from artd.tables.runs import begin_flush
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fakes.rows import (
    EVERY_STEP,
    FakeClock,
    add_run,
    count,
    data_dir,
    exchange,
    make_ingest,
    one,
    open_store,
    settle,
    submit,
    turn,
)  # fmt: skip
from tests.fakes.steps import claim, commit_next, pack

pytestmark = pytest.mark.asyncio
GROUPS = 1500


async def open_groups(store, number: int, split: str = "train") -> None:
    """Open groups of two trajectories each."""

    def write(c):
        for name in range(number):
            group = c.execute(
                "INSERT INTO trajectory_group (run_id, name, split, state, size, deadline, created)"
                " VALUES (1, ?, ?, 'open', 2, 5, 0)", (f"{split}-{name}", split),
            ).lastrowid  # fmt: skip
            for member in range(2):
                row = (group, f"{split}-{name}-{member}", float(member), split)
                added = c.execute(
                    "INSERT INTO trajectory (run_id, group_id, key, content, digest, reward, split, state, tokens, created)"
                    " VALUES (1, ?, ?, '', '', ?, ?, 'queued', 1, 0)", row,
                ).lastrowid  # fmt: skip
                c.execute(
                    "INSERT INTO trajectory_data (trajectory_id, metrics, body) VALUES (?, x'7b7d', x'90')", (added,)
                )

    await store.write(write)


@pytest.fixture
def longest(monkeypatch):
    """Groups that one transaction touched, at most."""
    found = [0]
    for name in ("seal_due", "flush", "discard_waiting"):
        inner = getattr(slices, name)

        def noted(c, *args, inner=inner):
            before = c.execute("SELECT count(*) FROM event").fetchone()[0]
            answer = inner(c, *args)
            found[0] = max(found[0], c.execute("SELECT count(*) FROM event").fetchone()[0] - before)
            return answer

        monkeypatch.setattr(slices, name, noted)
    return found


async def test_a_flush_of_many_groups_lets_submits_through(tmp_path, longest):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await open_groups(store, GROUPS)
        flush = asyncio.ensure_future(ingest.flush(api.Flush(run="r")))
        await until(lambda: longest[0])
        await submit(ingest, group="late", key="late")
        assert await one(store, "SELECT flush FROM run") == 0, "packed is what there is at its end"
        await flush
        assert longest[0] <= 101
        rows = dict(await store.read("SELECT name, state FROM trajectory_group WHERE state = 'open'"))
        assert rows == {"late": "open"}, "what came meanwhile is not meant"
        assert [tuple(row) for row in await store.read("SELECT flush, flush_to FROM run")] == [(1, 0)]
        assert await count(store, "event", "kind = 'run.flushed'") == 1


async def test_deadlines_and_what_a_restart_interrupted_go_on_in_slices(tmp_path, longest):
    async with open_store(tmp_path) as store:
        await add_run(store)
        data = data_dir(tmp_path)
        await open_groups(store, 350)
        await store.write(lambda c: begin_flush(c, 1))
        await open_groups(store, 5, "eval")
        ingest = make_ingest(store, data)
        ingest._jumped = lambda: True  # no deadline counts
        task = asyncio.ensure_future(ingest.run())
        await until(lambda: longest[0])
        while await one(store, "SELECT flush FROM run") == 0:
            await asyncio.sleep(0.01)
        assert await count(store, "trajectory_group", "state = 'sealed'") == 350 and longest[0] <= 101
        ingest._jumped = lambda: False
        while await count(store, "trajectory_group", "state = 'open'"):
            await asyncio.sleep(0.01)
        await settle(task)


async def test_what_waits_when_its_run_is_finished_is_discarded_and_collected(tmp_path, longest):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        ingest = make_ingest(store, data)
        await open_groups(store, 150)
        await ingest.flush(api.Flush(run="r"))
        await open_groups(store, 3, "eval")
        await submit(ingest, group="open", key="open")
        await Runs(store, lambda: None, EVERY_STEP).set_state("r", "finished")
        assert longest[0] <= 101
        found = await store.read("SELECT DISTINCT split, state, reason FROM trajectory ORDER BY split")
        assert [tuple(row) for row in found] == [("eval", "queued", ""), ("train", "discarded", "the run was finished")]
        assert await count(store, "trajectory_group", "split = 'train' AND state = 'discarded'") == 151
        await store.write(ingest._seal_due)  # those for evaluation
        clock.ms += 31 * DAY_MS
        await Collector(store, Blobs(data.blobs), Retention()).collect()
        assert await count(store, "trajectory", "payload = 'kept'") == 0
        assert await count(store, "trajectory_data", "body IS NOT NULL") == 0


async def test_what_is_open_for_evaluation_is_kept(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await open_groups(store, 2, "eval")
        clock.ms += 31 * DAY_MS
        await Collector(store, Blobs(data.blobs), Retention()).collect()
        assert await count(store, "trajectory", "payload = 'kept'") == 4


@pytest.mark.parametrize("running", [False, True])
async def test_a_batch_of_a_finished_run_is_discarded_with_its_job(tmp_path, running):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        ingest = make_ingest(store, data)
        for number in range(2):
            await submit(ingest, key=f"k{number}", reward=float(number))
        assert await pack(store, data)
        order = await claim(store, data) if running else None
        await Runs(store, lambda: None, EVERY_STEP).set_state("r", "finished")
        if order is not None:
            await store.write(lambda c: interrupt(c, 0, "gone"))
        rows = await store.read("SELECT state, reason, batch_id FROM trajectory")
        assert {tuple(row) for row in rows} == {("discarded", "the run was finished", 1)}
        assert await one(store, "SELECT state FROM trajectory_group") == "discarded"


async def test_a_cancelled_batch_still_waits(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        ingest = make_ingest(store, data)
        for number in range(2):
            await submit(ingest, key=f"k{number}", reward=float(number))
        assert await pack(store, data)
        await store.write(lambda c: end_job(c, 0, 2, False))
        assert await one(store, "SELECT DISTINCT state FROM trajectory") == "queued"


@pytest.mark.parametrize("max_inline", [65536, 64])
async def test_the_ledger_keeps_no_more_bytes_than_it_may(tmp_path, max_inline):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        ingest = Ingest(store, Blobs(data.blobs), max_inline)
        for number in range(20):
            clock.ms += 1000
            await exchange(
                ingest, f"resp-{number}", turns=[turn(response_id=f"resp-{number}", raw=bytes([number]) * 1000)]
            )
        kept = await one(store, "SELECT bytes FROM exchange_count")
        assert 20_000 < kept < 30_000
        done = await Collector(store, Blobs(data.blobs), Retention(exchanges_gib=10_500 / 2**30)).collect()
        left = [row[0] for row in await store.read("SELECT response_id FROM exchange ORDER BY id")]
        assert left == [f"resp-{number}" for number in range(20 - len(left), 20)] and 8 <= len(left) <= 10
        assert await one(store, "SELECT bytes FROM exchange_count") <= 10_500
        assert next(row for row in done.rows() if row["what"] == "expired")["count"] == 20 - len(left)
