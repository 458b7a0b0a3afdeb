"""lists: every table can be listed, filtered and paged."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from artd.api import listing
from artd.api.listing import read_events, read_rows
from artd.api.texts import choose_samples
from artd.errors import Invalid, NotFound
from artd.store import pages
from artd.store.pages import QUERIES
from artd_schema.codec import Codec, WireError
from artd_schema.wire import client_api as api
from tests.fakes.rows import add_run, data_dir, exchange, make_ingest, open_store, submit
from tests.fakes.steps import commit_next, serve, train_next

pytestmark = pytest.mark.asyncio


async def world(store, tmp_path):
    data = data_dir(tmp_path)
    await add_run(store)
    await commit_next(store, data)
    await serve(store, 1, data)
    await train_next(store, data)
    await exchange(make_ingest(store, data), rollout="t")


async def listed(store, **asked):
    """Rows of one page."""
    return (await read_rows(store, api.List(**asked))).rows


async def told(store, **asked):
    return (await read_events(store, api.Events(**asked))).rows


async def test_every_table_lists_its_rows_newest_first(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        for what in QUERIES:
            rows = await listed(store, what=what)
            assert rows, what
            if what == "workers":
                assert [row["name"] for row in rows] == ["trainer-1", "engine-1-0"]
            else:
                assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True), what
            assert all(not isinstance(value, bytes) for row in rows for value in row.values()), what


async def test_values_are_decoded(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        (job, _) = await listed(store, what="jobs")
        assert job["metrics"]["loss"] == 0.5 and "pack" in job["seconds"] and job["run"] == "r"
        (trajectory, _) = await listed(store, what="trajectories")
        assert trajectory["group"] == "auto-0-0" and trajectory["metrics"] == {"metrics": {}, "metadata": {}}


async def test_filters(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        read = functools.partial(listed, store)
        assert [row["kind"] for row in await read(what="jobs", states=("succeeded",))] == ["train", "init"]
        assert await read(what="jobs", states=("queued", "running")) == []
        assert len(await read(what="jobs", run="r", limit=1)) == 1
        assert [row["id"] for row in await read(what="jobs", after=0)] == [1, 2]
        assert [row["id"] for row in await read(what="jobs", before=2)] == [1]
        assert await read(what="jobs", limit=0) == []
        assert len(await read(what="events", run="r", states=("x",))) > 3
        assert [row["name"] for row in await read(what="runs", run="r")] == ["r"]
        assert await read(what="runs", run="s") == []
        assert len(await read(what="workers", run="other", after=9)) == 2, "they are of no run"
        with pytest.raises(NotFound, match="unknown listing 'secrets'"):
            await read(what="secrets")


@pytest.mark.parametrize(
    "filters", [{}, {"run": "r"}, {"states": ("trained", "discarded")}, {"run": "r", "states": ("queued",)}]
)
async def test_pages_in_both_directions_hold_every_row_once(tmp_path, monkeypatch, filters):
    monkeypatch.setattr(pages, "MERGED", 3)
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        for number in range(24):
            await submit(ingest, group=f"g{number // 2}", key=f"k{number}", reward=float(number % 3 == 0))
        everything = [row["id"] for row in await listed(store, what="trajectories", limit=10_000, **filters)]
        assert len(everything) in (8, 16, 24) and everything == sorted(everything, reverse=True)
        newest, oldest = [], []
        while page := await listed(
            store, what="trajectories", before=newest[-1] if newest else None, limit=5, **filters
        ):
            newest += [row["id"] for row in page]
        while page := await listed(store, what="trajectories", after=oldest[-1] if oldest else 0, limit=5, **filters):
            oldest += [row["id"] for row in page]
        assert newest == everything == oldest[::-1]
        between = await listed(store, what="trajectories", after=3, before=20, **filters)
        assert [row["id"] for row in between] == [number for number in everything[::-1] if 3 < number < 20]


async def test_a_state_that_is_repeated_fills_a_page_once(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        for number in range(6):
            await submit(ingest, group=f"g{number // 2}", key=f"k{number}", reward=float(number % 2))
        for order in ({}, {"after": 0}):
            once = await listed(store, what="trajectories", states=("queued",), limit=4, **order)
            again = await listed(store, what="trajectories", states=("queued",) * 3, limit=4, **order)
            assert len(once) == 4 and once == again


async def test_a_list_names_so_many_states_at_most():
    codec: Codec[api.Request] = Codec(api.Request)
    for number in (api.MOST_STATES, api.MOST_STATES + 1):
        frames = codec.encode(api.Request(id=1, op=api.List(what="jobs", states=("queued",) * number)))
        if number == api.MOST_STATES:
            codec.decode(frames)
        else:
            with pytest.raises(WireError, match=f"length <= {api.MOST_STATES}"):
                codec.decode(frames)


async def test_an_answer_ends_before_it_becomes_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "BYTES", 3000)
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        for number in range(5):
            await submit(ingest, key=f"k{number}", group=f"g{number}", metadata={"text": "x" * 1000})
        answer = await read_rows(store, api.List(what="trajectories"))
        assert ([row["key"] for row in answer.rows], answer.more) == (["k4", "k3"], True)
        monkeypatch.setattr(listing, "BYTES", 10)
        assert len((await read_rows(store, api.List(what="trajectories"))).rows) == 1, "else nobody ever sees it"


async def test_what_no_row_can_be_is_told(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        for what in set(QUERIES) - {"runs", "workers"}:
            with pytest.raises(NotFound, match="no run 'other'"):
                await listed(store, what=what, run="other")
        for what in set(QUERIES) - {"events"}:
            with pytest.raises(Invalid, match=f"unknown state 'comitted' of {what}"):
                await listed(store, what=what, states=("comitted",))
            states = {row["state"] for row in await listed(store, what=what)}
            assert await listed(store, what=what, states=tuple(states)), "what a row has can be asked for"


async def test_a_negative_limit_is_not_everything(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        assert await listed(store, what="events", limit=-1) == []
        assert await told(store, limit=-1) == []


async def test_events_are_oldest_first_and_go_on_after_an_id(tmp_path):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        events = await told(store, limit=5)
        assert [e["id"] for e in events] == [1, 2, 3, 4, 5]
        assert [e["id"] for e in await told(store, after=3, limit=2)] == [4, 5]
        assert await told(store, run="other") == []
        assert events[0]["kind"] == "run.created" and events[0]["data"]["mode"] == "merged"


async def test_samples_that_fit_no_answer_are_refused(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        await world(store, tmp_path)
        parts = SimpleNamespace(store=store)
        asked = functools.partial(api.Samples, run="r")
        monkeypatch.setattr(listing, "BYTES", 10)
        with pytest.raises(Invalid, match="limit: the rows of 1 trajectories fill an answer: ask for that many"):
            await choose_samples(parts, asked(limit=2))
        assert len((await choose_samples(parts, asked(limit=1))).rows) == 1
        with pytest.raises(NotFound, match="there is no run 'other'"):
            await choose_samples(parts, api.Samples(run="other"))
