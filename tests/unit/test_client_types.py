"""A program as its author's type checker sees it: `make check` holds the calls below to the client's types, without exception."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Any, assert_type

import pytest

from artd_client import Client, Run, SyncClient, SyncRun, turn
from artd_schema.wire import client_api as api
from tests.fake_daemon import RUN, ClientDaemon, usual

Row = dict[str, Any]


class Mine(SyncClient):
    """A client with something of its own."""

    label = "mine"


class MyAsync(Client):
    label = "mine"


def following(op: api.Op) -> Any:
    return api.Rows(rows=[{"id": op.after + 1}]) if isinstance(op, api.Events) else usual(op)


def test_what_may_be_closed_says_so(daemon: ClientDaemon) -> None:
    daemon.handle = following
    with Mine(daemon.data) as art:
        assert art.label == "mine"
        run = assert_type(art.run("r"), SyncRun)
        assert run.refresh().info == RUN
        of_all, of_run = art.events(after=6), run.events()
        assert_type(of_all, Generator[Row, None, None])
        assert_type(of_run, Generator[Row, None, None])
        assert (next(of_all)["id"], next(of_run)["id"]) == (7, 1)
        for events in (of_all, of_run):
            events.close()


@pytest.mark.asyncio
async def test_so_do_those_of_the_asynchronous_client(daemon: ClientDaemon) -> None:
    daemon.handle = following
    async with MyAsync(daemon.data) as art:
        assert art.label == "mine"
        run = assert_type(await art.run("r"), Run)
        async with aclosing(run.events()) as events:
            assert_type(events, AsyncGenerator[Row, None])
            assert (await anext(events))["id"] == 1


def test_numbers_of_any_kind_are_metrics(daemon: ClientDaemon) -> None:
    counts: dict[str, int] = {"tokens": 3}
    with SyncClient(daemon.data) as art:
        art.run("r").submit("g", 1, turns=[turn([1], [2], [-0.5])], metrics=counts, key="k")
    (op,) = daemon.ops(api.Submit)
    assert op.metrics == {"tokens": 3.0}
