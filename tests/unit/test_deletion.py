"""deletion: a finished run goes with all it stored, a few rows at a time, and nothing of another run goes with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from artd.api.listing import read_rows
from artd.check.run import check
from artd.config import Retention
from artd.errors import Conflict, NotFound
from artd.retention import deletion
from artd.retention.collector import Collector
from artd.retention.deletion import Deleter, mark
from artd.runs.lifecycle import Runs, set_run_state
from artd.store.blobs import Blobs
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fakes.rows import EVERY_STEP, add_run, count, data_dir, make_ingest, one, open_store, settle, submit
from tests.fakes.steps import commit_next
from tests.fakes.world import copy

OF_A_RUN = (
    "exchange",
    "trajectory",
    "trajectory_group",
    "serving",
    "push",
    "checkpoint",
    "job",
    "batch",
    "metric",
    "group_count",
    "pause",
    "process",
)


async def order(store, name: str, request: str = "") -> api.Done:
    return await store.write(lambda c: mark(c, store.clock.now_ms(), api.DeleteRun(run=name, request=request)))


async def held(store, run: int) -> dict[str, int]:
    """Rows of a run in each table that has some."""
    found = {table: await count(store, table, f"run_id = {run}") for table in OF_A_RUN}
    return {table: number for table, number in found.items() if number}


async def watched(store, monkeypatch, after_each, cut: int = 0) -> None:
    """Delete what is due, with `after_each` called after every commit; cut: die after so many."""
    write, commits = store.write, 0

    async def wrapped(fn):
        nonlocal commits
        done = await write(fn)
        commits += 1
        await after_each(commits)
        if commits == cut:
            raise InterruptedError
        return done

    (due,) = await store.read(deletion.DUE)
    monkeypatch.setattr(store, "write", wrapped)
    try:
        await Deleter(store, data_dir(store.path.parent))._delete(due["id"], due["name"])
    finally:
        monkeypatch.setattr(store, "write", write)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Run 1 (`old`) is finished, run 2 (`r`) is active."""
    return copy(tmp_path / "data")


async def give_away(store) -> None:
    await store.write(lambda c: c.execute("UPDATE serving SET state = 'gone' WHERE run_id = 1").rowcount)
    await store.write(lambda c: c.execute("UPDATE process SET state = 'stopped' WHERE run_id = 1").rowcount)
    await order(store, "old")


def test_every_commit_of_a_deletion_keeps_every_promise(root: Path, monkeypatch):
    """So a daemon may die after any of them: `artd check --deep` is clean, and the next boot goes on."""
    monkeypatch.setattr(deletion, "ROWS", 2)

    async def clean(commits: int) -> None:
        report = await asyncio.to_thread(check, root, deep=commits % 8 == 0, live=True)
        assert not report.broken, [(outcome.name, outcome.violations) for outcome in report.broken]

    async def main() -> None:
        async with open_store(root) as store:
            others = await held(store, 2)
            folders = [row["dir"] for row in await store.read("SELECT dir FROM checkpoint WHERE run_id = 1")]
            assert len(await held(store, 1)) >= 7
            logs = [data_dir(root).log(name) for name in ("trainer-1", "engine-1-0", "engine-1-0-server", "trainer-2")]
            for log in logs:
                log.write_text("words")
            await give_away(store)
            with pytest.raises(InterruptedError):
                await watched(store, monkeypatch, clean, cut=12)
            assert await held(store, 1)
            await watched(store, monkeypatch, clean)
            assert await held(store, 1) == {} and await held(store, 2) == others
            assert not any((root / folder).exists() for folder in folders)
            assert [log.exists() for log in logs] == [False, False, False, True]
            assert await count(store, "event", "run = 'old'") == 0 and await count(store, "event", "run = 'r'")
            assert await one(store, "SELECT name FROM run WHERE id = 1") == ".deleted.1"

    asyncio.run(main())
    assert not check(root, deep=True).broken


@pytest.mark.asyncio
async def test_its_contents_are_collected(root: Path):
    async with open_store(root) as store:
        data = data_dir(root)
        await give_away(store)
        before = await count(store, "blob")
        task = asyncio.ensure_future(Deleter(store, data).run())
        await until(lambda: count(store, "run", "name = '.deleted.1'"))
        await settle(task)
        await Collector(store, Blobs(data.blobs, store.clock.monotonic), Retention()).collect()
        assert 0 < await count(store, "blob") < before
    assert not check(root, deep=True).broken


@pytest.mark.asyncio
async def test_only_a_finished_run_is_deleted(tmp_path: Path):
    async with open_store(tmp_path) as store:
        run = await add_run(store)
        with pytest.raises(Conflict, match="run 'r' is active, and only a finished run can be deleted"):
            await order(store, "r")
        with pytest.raises(NotFound, match="no run 'x'"):
            await order(store, "x")
        await store.write(lambda c: set_run_state(c, 0, run, "finished", ""))
        await order(store, "r", "7f")
        await order(store, "r", "7f")  # repeated after a reconnect
        with pytest.raises(NotFound):
            await order(store, "r", "80")


@pytest.mark.asyncio
async def test_its_name_is_free_at_once_and_nobody_reaches_it_any_more(tmp_path: Path):
    async with open_store(tmp_path) as store:
        ingest, runs = make_ingest(store, data_dir(tmp_path)), Runs(store, lambda _: None, EVERY_STEP)
        first = await add_run(store)
        await submit(ingest, key="a")
        await store.write(lambda c: set_run_state(c, 0, first, "finished", ""))
        await order(store, "r")
        ingest.forget("r")
        with pytest.raises(NotFound):
            await submit(ingest, key="b")
        with pytest.raises(NotFound):
            await runs.create(api.CreateRun(name=await one(store, "SELECT name FROM run")))
        assert (await read_rows(store, api.List(what="runs"))).rows == []
        second = await add_run(store)
        await submit(ingest, key="a")
        assert second != first and await one(store, "SELECT run_id FROM trajectory WHERE run_id > 1") == second


@pytest.mark.asyncio
async def test_a_run_with_a_worker_at_work_waits(tmp_path: Path):
    """Its trainer still stages a result, or its engine still serves an adapter."""
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        run = await add_run(store)
        await commit_next(store, data)
        await store.write(lambda c: set_run_state(c, 0, run, "finished", ""))
        await store.write(
            lambda c: (
                c.execute(
                    "INSERT INTO serving (engine, spawn, run_id, checkpoint_id, name, state, created)"
                    " VALUES ('engine', 1, 1, 1, 'r@0', 'draining', 0)"
                ).rowcount
            )
        )
        await order(store, "r")
        assert await store.read(deletion.DUE) == []
        await store.write(lambda c: c.execute("UPDATE serving SET state = 'gone'").rowcount)
        assert await store.read(deletion.DUE) == [], "its trainer is still ready"
        await store.write(lambda c: c.execute("UPDATE process SET state = 'stopped'").rowcount)
        assert len(await store.read(deletion.DUE)) == 1
