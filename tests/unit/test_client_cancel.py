"""Calls that are cancelled, by asyncio or by anyio's scopes: nothing is left behind, and what they meant stays repeatable."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

import artd_client
from artd_client import Client, SyncClient, turn
from artd_client.blocking import Loop
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fake_daemon import usual

ONE = turn([1, 2], [3], [-0.5])


def deaf(op):
    return None if isinstance(op, api.Submit) else usual(op)


@pytest.mark.asyncio
async def test_a_cancelled_submit_leaves_nothing_and_its_key_repeats_it(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.handle = deaf
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: run.submit("g", 1.0, turns=[ONE], key="a"))
            await until(lambda: daemon.ops(api.Submit))
            group.cancel_scope.cancel()
        assert group.cancel_scope.cancelled_caught and not art._connection._calls
        daemon.handle = usual
        await run.submit("g", 1.0, turns=[ONE], key="a")
        await run.submit("g", 1.0, turns=[ONE])
    cancelled, again, further = (op.key for op in daemon.ops(api.Submit))
    assert cancelled == again != further


@pytest.mark.asyncio
async def test_a_client_in_a_cancelled_scope_is_closed_whole(daemon):
    """anyio cancels again at every await, so nothing that matters may stand behind one."""
    art = Client(daemon.data)
    other = []

    async def waits(run):
        with pytest.raises(artd_client.Closed) as caught:
            await run.submit("g", 1.0, turns=[ONE])
        other.append(caught.value)

    with anyio.CancelScope() as scope:
        async with art:
            connection = art._connection
            run = await art.run("r")
            made = run.openai()
            daemon.handle = deaf
            task = asyncio.create_task(waits(run))
            await until(lambda: daemon.ops(api.Submit))
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    await asyncio.wait_for(task, 5)
    assert len(other) == 1
    assert connection._context.closed and connection._link is None and not connection._calls
    assert connection._task.done() and (connection._ticker is None or connection._ticker.cancelled())
    assert made.is_closed()
    async with art:
        assert await art.runs() == []


@pytest.mark.asyncio
async def test_opening_in_a_scope_that_ends_leaves_nothing(daemon):
    daemon.announce(state="starting", socket="")
    made = []
    real = artd_client.client.Connection
    artd_client.client.Connection = lambda *args: made.append(real(*args)) or made[-1]
    try:
        with anyio.move_on_after(0.2) as scope:
            async with Client(daemon.data):
                pass
    finally:
        artd_client.client.Connection = real
    assert scope.cancelled_caught
    await asyncio.sleep(0.05)
    assert made[0]._context.closed and made[0]._task.done()


def test_no_call_outlives_a_sync_client(daemon):
    """Whatever the moment at which another thread closes it."""
    daemon.handle = lambda op: None
    for _ in range(20):
        art = SyncClient(daemon.data).__enter__()
        ended = []

        def ask(art=art, ended=ended):
            try:
                while True:
                    art.runs()
            except artd_client.Closed:
                ended.append(True)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        [thread.start() for thread in threads]
        art.close()
        [thread.join(5) for thread in threads]
        assert len(ended) == 4


def test_what_comes_while_the_loop_of_a_sync_client_ends_is_ended_with_it(daemon):
    with SyncClient(daemon.data) as art:
        loop = art._running
    with pytest.raises(artd_client.Closed):
        loop.call(art._client.runs())
    loop = Loop()
    outcome = []

    def forever():
        try:
            loop.call(asyncio.sleep(1000))
        except artd_client.Closed:
            outcome.append("closed")

    thread = threading.Thread(target=forever, daemon=True)
    thread.start()
    while not asyncio.all_tasks(loop._loop):
        pass
    loop.close()
    thread.join(5)
    assert outcome == ["closed"]
