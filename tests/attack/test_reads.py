"""Reads never hold up writes or each other: what one client asks is no other's wait."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import pytest

from artd.api.listing import read_rows
from artd.api.requests import _failure
from artd.store import readers, writer
from artd.store import store as stores
from artd.store.readers import Readers, TooSlow
from artd_schema.wire import client_api as api
from tests.fakes.rows import add_run, by_reference, data_dir, exchange, make_ingest, open_store, submit, turn

pytestmark = pytest.mark.asyncio
FOR_EVER = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


def slow(c: sqlite3.Connection) -> int:
    return int(c.execute(FOR_EVER).fetchone()[0])


async def test_a_question_that_takes_for_ever_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "DEADLINE_S", 1.0)
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        await exchange(ingest)
        asked = [asyncio.ensure_future(store.ask(slow)) for _ in range(3)]
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await submit(ingest, key="k")
        await ingest.submit(by_reference(("resp-1",), group="refs"), [])
        assert (await asyncio.wait_for(read_rows(store, api.List(what="trajectories")), 3.0)).rows
        assert time.monotonic() - started < 0.7 and not any(each.done() for each in asked)
        for each in asked:
            with pytest.raises(TooSlow):
                await asyncio.wait_for(each, 3.0)


async def test_a_question_that_was_ended_is_answered_busy():
    answer = _failure(TooSlow("the daemon ended this query because it took too long"))
    assert answer.code == "busy" and "ask for fewer rows (limit)" in answer.message


async def test_a_question_ends_with_whoever_asked_it_and_with_the_store(tmp_path):
    async with open_store(tmp_path) as store:
        for _ in range(stores.CLIENTS):
            asked = asyncio.ensure_future(store.ask(slow))
            await asyncio.sleep(0.05)
            asked.cancel()
        assert await asyncio.wait_for(store.ask(lambda c: c.execute("SELECT 1").fetchone()[0]), 2.0) == 1
        left = asyncio.ensure_future(store.ask(slow))
        await asyncio.sleep(0.05)
        started = time.monotonic()
    assert time.monotonic() - started < 2.0
    with pytest.raises(TooSlow):
        await left


async def test_a_client_connection_cannot_write(tmp_path):
    async with open_store(tmp_path) as store:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            await store.ask(lambda c: c.execute("DELETE FROM event"))


async def test_readers_one_after_the_other_do_not_let_the_log_grow_for_ever(tmp_path, monkeypatch):
    """There is always one in the middle of a question that began before the newest commit."""
    monkeypatch.setattr(writer, "CHECKPOINT_BYTES", 200_000)
    monkeypatch.setattr(writer, "CHECKPOINT_BUSY_BYTES", 400_000)
    monkeypatch.setattr(stores, "DEADLINE_S", 0.2)
    log = tmp_path / "artd.db-wal"
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        ended = False

        def linger(c: sqlite3.Connection) -> None:
            c.execute("SELECT count(*) FROM run").fetchone()
            time.sleep(0.03)

        async def ask() -> None:
            while not ended:
                await store.ask(linger)

        asking = [asyncio.ensure_future(ask()) for _ in range(stores.CLIENTS)]
        largest = 0
        for number in range(150):
            await asyncio.sleep(0.004)
            largest = max(largest, log.stat().st_size)
            await submit(ingest, group=f"g{number}", key=f"k{number}", turns=(turn(raw=bytes([number]) * 50_000),))
        ended = True
        await asyncio.gather(*asking)
        assert largest < 4_000_000, "of 15 MB written"


async def test_a_hold_ends_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "HOLD_S", 0.2)
    async with open_store(tmp_path) as store:
        held = Readers(store.path, 1, 5.0)
        held.hold(True)
        started = time.monotonic()
        assert await held.run(lambda c: c.execute("SELECT 1").fetchone()[0]) == 1
        assert time.monotonic() - started >= 0.2
        await held.close()
