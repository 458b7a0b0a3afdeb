"""Carries out the orders of clients: one function for each message, found in `ORDERS` by the message's type.

A new order is a function here and its line in `ORDERS`. An order is durable when its function returns. An order that comes
again changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from artd.retention.collector import Collector
from artd.retention.deletion import mark
from artd.rollouts.ingest import Ingest
from artd.runs.lifecycle import Runs
from artd.runs.rollback import rollback as roll_back
from artd.store.store import Store
from artd.training.dispatch import Dispatch
from artd_schema.wire import client_api as api

from . import job_orders
from .group_orders import discard_group as discard

NO_NOTE = (api.DiscardGroup, api.Collect, api.Shutdown)
"""Orders for which no event names the client."""


@dataclass
class Parts:
    """The services that answer requests. `stop(drain_s)` asks the daemon to end; `revive()` starts broken workers again."""

    store: Store
    ingest: Ingest
    runs: Runs
    dispatch: Dispatch
    collector: Collector | None
    stop: Callable[[float], None]
    revive: Callable[[], None]

    async def write(self, change: Callable[[sqlite3.Connection, int], object]) -> api.Done:
        """Call `change(connection, now)` in one transaction. `now` is in milliseconds since the epoch."""
        now = self.store.clock.now_ms()
        await self.store.write(lambda c: change(c, now))
        return api.Done()


Handler = Callable[[Parts, Any], Awaitable[api.Answer]]


async def flush(parts: Parts, op: api.Flush) -> api.Answer:
    return await parts.ingest.flush(op)


async def pause(parts: Parts, op: api.Pause) -> api.Answer:
    return await parts.runs.set_state(op.run, "paused", op.reason, op.request)


async def resume(parts: Parts, op: api.Resume) -> api.Answer:
    """Resume a run, and start again the workers that the daemon had given up."""
    answer = await parts.runs.set_state(op.run, "active", request=op.request)
    parts.revive()
    return answer


async def update(parts: Parts, op: api.UpdateRun) -> api.Answer:
    return await parts.runs.update(op)


async def finish(parts: Parts, op: api.Finish) -> api.Answer:
    return await parts.runs.set_state(op.run, "finished")


async def delete(parts: Parts, op: api.DeleteRun) -> api.Answer:
    done = await parts.write(lambda c, now: mark(c, now, op))
    parts.ingest.forget(op.run)
    return done


async def rollback(parts: Parts, op: api.Rollback) -> api.Answer:
    return await parts.write(lambda c, now: roll_back(c, now, op))


async def end_job(parts: Parts, op: api.CancelJob | api.DiscardJob) -> api.Answer:
    now = parts.store.clock.now_ms()
    if await parts.store.write(lambda c: job_orders.end_job(c, now, op.job, isinstance(op, api.DiscardJob))):
        parts.dispatch.cancel_running(op.job)
    return api.Done()


async def retry_job(parts: Parts, op: api.RetryJob) -> api.Answer:
    return await parts.write(lambda c, now: job_orders.retry(c, now, op.job, op.request))


async def discard_group(parts: Parts, op: api.DiscardGroup) -> api.Answer:
    return await parts.write(lambda c, now: discard(c, now, op.run, op.group))


async def collect(parts: Parts, op: api.Collect) -> api.Answer:
    assert parts.collector is not None
    done = await parts.collector.collect(op.dry, op.resume)
    return api.Collected(stopped=done.stopped, rows=done.rows())


async def shutdown(parts: Parts, op: api.Shutdown) -> api.Answer:
    parts.stop(op.drain_s)
    return api.Done()


ORDERS: dict[type[api.Op], Handler] = {
    api.Flush: flush,
    api.Pause: pause,
    api.Resume: resume,
    api.UpdateRun: update,
    api.Finish: finish,
    api.DeleteRun: delete,
    api.Rollback: rollback,
    api.CancelJob: end_job,
    api.DiscardJob: end_job,
    api.RetryJob: retry_job,
    api.DiscardGroup: discard_group,
    api.Collect: collect,
    api.Shutdown: shutdown,
}
