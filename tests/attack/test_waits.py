"""A thousand clients that wait cost what one costs, and those that left cost nothing."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from artd.api import requests
from artd.api.requests import Requests
from artd.runs import lifecycle
from artd.runs.lifecycle import Runs
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fakes.rows import EVERY_STEP, add_run, data_dir, make_ingest, open_store, submit
from tests.fakes.steps import commit_next, make_dispatch, serve

pytestmark = pytest.mark.asyncio
WAITERS = 1000


@pytest.fixture
def looks(monkeypatch):
    """Every look at the rows that a wait takes."""
    found: list[tuple[str, int, str]] = []
    look = lifecycle.find_progress

    def noted(c, key, *more):
        found.append(key)
        return look(c, key, *more)

    monkeypatch.setattr(lifecycle, "find_progress", noted)
    return found


async def test_waiters_share_their_looks_and_none_is_in_the_writer(tmp_path, looks):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await serve(store, 1, data)
        ingest, service = make_ingest(store, data), Runs(store, lambda: None, EVERY_STEP)
        await submit(ingest, group="open", key="open")
        waits = [asyncio.ensure_future(service.wait(api.WaitStep(run="r", step=1))) for _ in range(WAITERS)]
        await until(lambda: looks)
        await asyncio.sleep(0.2)
        assert len(looks) <= 20, "those who ask together"
        looks.clear()
        writes, started = store.commits[1], time.monotonic()
        slowest = 0.0
        for number in range(50):
            begun = time.monotonic()
            await submit(ingest, group=f"g{number}", key=f"k{number}")
            slowest = max(slowest, time.monotonic() - begun)
        changes = 2 + (time.monotonic() - started) / 0.02
        assert store.commits[1] - writes == 50, "a wait writes nothing"
        await asyncio.sleep(0.1)
        assert 1 <= len(looks) <= changes + 5 and not any(wait.done() for wait in waits)
        assert slowest < 0.25, "seconds of a submit beside them"
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        assert not service._waits._watches


async def test_all_are_answered_when_the_step_is_served(tmp_path, looks):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        service = Runs(store, lambda: None, EVERY_STEP)
        waits = [asyncio.ensure_future(service.wait(api.WaitStep(run="r", step=0))) for _ in range(20)]
        await until(lambda: looks)
        await commit_next(store, data)
        await serve(store, 1, data)
        answers = await asyncio.wait_for(asyncio.gather(*waits), 5.0)
        assert all(isinstance(answer, api.StepInfo) and answer.step == 0 for answer in answers)


async def test_a_wait_sees_what_its_client_was_told_before(tmp_path, monkeypatch):
    """It is not answered by a look of another waiter that began earlier, and takes long."""
    look = lifecycle.find_progress
    lingering = threading.Event()

    def linger(*asked):
        answer = look(*asked)
        lingering.set()
        time.sleep(0.05)
        return answer

    monkeypatch.setattr(lifecycle, "find_progress", linger)
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, groups_per_step=2)
        await commit_next(store, data)
        ingest, service = make_ingest(store, data), Runs(store, lambda: None, EVERY_STEP)
        for number in range(3):
            lingering.clear()
            other = asyncio.ensure_future(service.wait(api.WaitStep(run="r", step=1, timeout_s=0.0)))
            await until(lingering.is_set)
            await submit(ingest, group=f"g{number}", key=f"k{number}")
            assert isinstance(await service.wait(api.WaitStep(run="r", step=1, timeout_s=0.0)), api.Pending)
            await ingest.seal(api.Seal(run="r", group=f"g{number}"))
            assert isinstance(await service.wait(api.WaitStep(run="r", step=1, timeout_s=0.0)), api.Stalled)
            await other


async def test_the_waits_of_a_client_that_left_end(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "LOOK_S", 0.05)
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        ingest, service = make_ingest(store, data), Runs(store, lambda: None, EVERY_STEP)
        there, sent = {b"stays", b"leaves"}, []

        def send(peer, reply):
            sent.append((peer, reply.id))
            return peer in there

        desk = Requests(store, ingest, service, make_dispatch(store, data), send, lambda _: None, "i", 1 << 20)
        task = asyncio.ensure_future(desk.run())
        for peer in (b"stays", b"leaves"):
            desk.take(peer, api.Request(id=1, op=api.WaitStep(run="r", step=5)), [])
            desk.take(peer, api.Request(id=2, op=api.Events(after=10**9)), [])
        await until(lambda: (b"leaves", 0) in sent)
        assert len(desk._tasks) == 4
        there.discard(b"leaves")
        await until(lambda: len(desk._tasks) == 2)
        assert set(desk._waiting.values()) == {b"stays"} and {number for _, number in sent} == {0}
        task.cancel()
