"""A daemon that stops and is started again: a client sees the delay, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

import artd_client
from artd_client import Client, turn
from artd_client import connection as connection_module
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fake_daemon import usual

ONE = turn([1, 2], [3], [-0.5])


def draining(op):
    """A daemon that is stopping."""
    return usual(op) if isinstance(op, api.List) else api.Error(code="draining", message="the daemon is stopping")


@pytest.mark.asyncio
async def test_what_a_stopping_daemon_did_not_take_is_sent_to_the_next_one(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.handle = draining
        waiting = [asyncio.create_task(run.submit(f"g{n}", 1.0, turns=[ONE])) for n in range(5)]
        waiting += [asyncio.create_task(run.seal("g0")), asyncio.create_task(run.refresh())]
        await until(lambda: len(daemon.seen) == 1 + 7)
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        assert await art.runs() == [], "it can still be looked at"
        first = [entry[1:] for entry in daemon.seen[1:8]]
        daemon.die()
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        daemon.handle = usual
        daemon.start()
        await asyncio.gather(*waiting)
    assert [entry[1:] for entry in daemon.seen[9:]] == first, "the same numbers and keys, each once"


@pytest.mark.asyncio
async def test_an_order_that_was_refused_while_draining_is_sent_to_the_next_daemon(daemon):
    async with Client(daemon.data) as art:
        daemon.handle = draining
        waiting = asyncio.create_task(art.retry(3))
        await until(lambda: daemon.seen)
        await asyncio.sleep(0.1)
        daemon.die()
        daemon.handle = usual
        daemon.start()
        await waiting
    first, second = daemon.ops(api.RetryJob)
    assert first == second and first.job == 3 and first.request


@pytest.mark.asyncio
async def test_a_daemon_that_does_not_come_back_is_named(daemon, monkeypatch):
    monkeypatch.setattr(connection_module, "TICK_S", 0.05)
    daemon.handle = draining
    async with Client(daemon.data, timeout=0.4) as art:
        with pytest.raises(artd_client.Draining, match="is stopping"):
            await art.cancel(1)
        waiting = asyncio.create_task(art.cancel(2))
        await until(lambda: len(daemon.seen) == 2)
        daemon.die()
        (daemon.data / "daemon.json").unlink()
        with pytest.raises(artd_client.DaemonNotRunning, match="no daemon runs on"):
            await waiting
        assert not art._connection._calls


@pytest.mark.asyncio
async def test_a_wait_goes_on_with_the_next_daemon(daemon):
    step = api.StepInfo(run="r", step=1, checkpoint="c", metrics={}, seconds={})
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.handle = draining
        waiting = asyncio.create_task(run.wait(1, timeout=20))
        await until(lambda: daemon.ops(api.WaitStep))
        daemon.die()
        daemon.handle = lambda op: step
        daemon.start()
        assert await waiting == step


@pytest.mark.asyncio
async def test_a_wait_ends_in_time_though_the_daemon_is_away(daemon, monkeypatch):
    """However long the client itself would wait."""
    monkeypatch.setattr(connection_module, "TICK_S", 0.05)
    monkeypatch.setattr("artd_client.run.ANSWER_S", 0.1)
    loop = asyncio.get_running_loop()
    async with Client(daemon.data, timeout=60.0) as art:
        run = await art.run("r")
        daemon.handle = lambda op: None
        started = loop.time()
        async with asyncio.timeout(10):
            with pytest.raises(artd_client.TimedOut):
                await run.wait(1, timeout=0.3)
            daemon.die()
            with pytest.raises(artd_client.DaemonNotRunning):
                await run.wait(1, timeout=0.3)
        assert loop.time() - started < 5.0


@pytest.mark.asyncio
async def test_events_go_on_after_the_last_one_that_was_seen(daemon):
    events = iter([[{"id": 4}, {"id": 5}], [{"id": 6}]])
    daemon.handle = lambda op: api.Rows(rows=next(events))
    async with Client(daemon.data) as art:
        source = art.events(after=3)
        assert [(await anext(source))["id"], (await anext(source))["id"]] == [4, 5]
        answering, daemon.handle = daemon.handle, draining
        following = asyncio.create_task(anext(source))
        await until(lambda: len(daemon.ops(api.Events)) == 2)
        daemon.die()
        daemon.handle = answering
        daemon.start()
        assert (await following)["id"] == 6
        await source.aclose()
    assert [op.after for op in daemon.ops(api.Events)] == [3, 5, 5]
