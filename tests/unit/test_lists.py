"""lists: every table can be listed, filtered and paged."""

from __future__ import annotations

import pytest

from artd.errors import Invalid, NotFound
from artd.lists import QUERIES, read_events, read_rows
from artd_schema import client_api as api
from tests.fakes.rows import add_run, data_dir, open_store
from tests.fakes.steps import commit_next, serve, train_next

pytestmark = pytest.mark.asyncio


async def world(store, tmp_path):
    data = data_dir(tmp_path)
    await add_run(store)
    await commit_next(store, data)
    await serve(store, 1, data)
    await train_next(store, data)


async def test_every_table_lists_its_rows_newest_first(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        for what in QUERIES:
            rows = await read_rows(store, api.List(what=what))
            assert rows, what
            if what == "workers":
                assert [row["name"] for row in rows] == ["trainer", "engine"]
            else:
                assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True), what
            assert all(not isinstance(value, bytes) for row in rows for value in row.values()), what


async def test_values_are_decoded(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        (job, _) = await read_rows(store, api.List(what="jobs"))
        assert job["metrics"] == {"loss": 0.5} and "pack" in job["seconds"] and job["run"] == "r"
        (trajectory, _) = await read_rows(store, api.List(what="trajectories"))
        assert trajectory["group"] == "auto-0-0" and trajectory["metrics"] == {"metrics": {}, "metadata": {}}


async def test_filters(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        read = lambda **k: read_rows(store, api.List(**k))  # noqa: E731
        assert [row["kind"] for row in await read(what="jobs", states=("succeeded",))] == ["train", "init"]
        assert await read(what="jobs", states=("queued", "running")) == []
        assert len(await read(what="jobs", run="r", limit=1)) == 1
        assert [row["id"] for row in await read(what="jobs", after=1)] == [2]
        assert await read(what="jobs", limit=0) == []
        assert len(await read(what="events", run="r", states=("x",))) > 3
        assert [row["name"] for row in await read(what="runs", run="r")] == ["r"]
        assert await read(what="runs", run="s") == []
        assert len(await read(what="workers", run="other", after=9)) == 2, "they are of no run"
        with pytest.raises(NotFound, match="nothing is listed as 'secrets'"):
            await read(what="secrets")


async def test_what_no_row_can_be_is_told(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        for what in set(QUERIES) - {"runs", "workers"}:
            with pytest.raises(NotFound, match="no run 'other'"):
                await read_rows(store, api.List(what=what, run="other"))
        for what in set(QUERIES) - {"events"}:
            with pytest.raises(Invalid, match=f"none of the {what} is ever 'comitted'"):
                await read_rows(store, api.List(what=what, states=("comitted",)))
            states = {row["state"] for row in await read_rows(store, api.List(what=what))}
            assert await read_rows(store, api.List(what=what, states=tuple(states))), "what a row has can be asked for"


async def test_a_negative_limit_is_not_everything(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        assert await read_rows(store, api.List(what="events", limit=-1)) == []
        assert await read_events(store, api.Events(limit=-1)) == []


async def test_events_are_oldest_first_and_go_on_after_an_id(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        events = await read_events(store, api.Events(limit=5))
        assert [e["id"] for e in events] == [1, 2, 3, 4, 5]
        assert [e["id"] for e in await read_events(store, api.Events(after=3, limit=2))] == [4, 5]
        assert await read_events(store, api.Events(run="other")) == []
        assert events[0]["kind"] == "run.created" and events[0]["data"]["mode"] == "merged"
