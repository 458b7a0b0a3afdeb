"""What clients ask: each request is answered by exactly one reply, errors by their code.

Owner of: nothing; the services own the rows. Invariants: nothing a client sends ends the daemon; a reply to a change
leaves after its COMMIT.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from artd_schema import PROTOCOL
from artd_schema import client_api as api
from artd_schema.codec import UNREADABLE, WireError

from . import __version__
from .core.states import IllegalTransition
from .dispatch import Dispatch
from .errors import Busy, Conflict, Draining, Invalid, RequestError
from .gc import Collector
from .ingest import Ingest
from .job_orders import end_for_good, retry
from .lists import read_events, read_rows
from .rollback import rollback
from .runs import Runs
from .store.fs import is_full
from .store.store import Store
from .store.writer import StoreFull

log = logging.getLogger(__name__)
Send = Callable[[bytes, api.Reply], object]
DISCARDED = "the daemon is stopping; start it again with `artd start` and resend"


class _Number(msgspec.Struct):
    """What every request has, whatever else is in it."""

    id: int


class Requests:
    """`take` is the client router's handler. stop(drain_s): asks the daemon to end; revive: starts broken workers again."""

    def __init__(
        self, store: Store, ingest: Ingest, runs: Runs, dispatch: Dispatch, send: Send, stop: Callable[[float], None],
        instance: str, max_message: int, revive: Callable[[], None] = lambda: None, collector: Collector | None = None,
    ) -> None:  # fmt: skip
        self._collector = collector
        self._revive = revive
        self._store = store
        self._ingest = ingest
        self._runs = runs
        self._dispatch = dispatch
        self._send = send
        self._stop = stop
        self._welcome = api.Welcome(protocol=PROTOCOL, instance=instance, version=__version__, max_message=max_message)
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False

    async def _resume(self, op: api.Resume) -> api.Answer:
        """Workers that were given up are started again once it is clear that there is a run for them."""
        answer = await self._runs.set_state(op.run, "active")
        self._revive()
        return answer

    def refuse(self, peer: bytes, frames: list[bytes], error: WireError) -> None:
        """Answer a request that cannot be decoded, when it at least has a number: a bad value, or a newer client."""
        try:
            number = msgspec.msgpack.decode(frames[1], type=_Number).id
        except (IndexError, *UNREADABLE):
            return  # nobody waits for an answer to this; the router counted and logged it
        text, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`").removeprefix("op.")
        message = f"{field}: {text}" if field else f"the request cannot be read: {text}"
        self._send(peer, api.Reply(id=number, answer=_error(Invalid(message, field=field))))

    def take(self, peer: bytes, request: api.Request, bulk: list[bytes]) -> None:
        if (
            isinstance(request.op, api.Submit)
            and not self.draining
            and self._submit_fast(peer, request, request.op, bulk)
        ):
            return
        task = asyncio.ensure_future(self._answer(peer, request, bulk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _submit_fast(self, peer: bytes, request: api.Request, op: api.Submit, bulk: list[bytes]) -> bool:
        """Small submits by value need no task of their own."""
        try:
            return self._ingest.submit_now(op, bulk, functools.partial(self._reply, peer, request.id))
        except Exception as error:
            self._reply(peer, request.id, error)
            return True

    def _reply(self, peer: bytes, number: int, outcome: api.Answer | BaseException) -> None:
        answer = _failure(outcome) if isinstance(outcome, BaseException) else outcome
        self._send(peer, api.Reply(id=number, answer=answer))

    async def _answer(self, peer: bytes, request: api.Request, bulk: list[bytes]) -> None:
        try:
            if self.draining and not isinstance(request.op, api.Hello | api.List | api.Shutdown):
                raise Draining(DISCARDED)
            answer = await self._serve(request.op, bulk)
        except Exception as error:
            answer = _failure(error)
        self._send(peer, api.Reply(id=request.id, answer=answer))

    def _serve(self, op: api.Op, bulk: list[bytes]) -> Awaitable[api.Answer]:
        match op:
            case api.Submit():
                return self._ingest.submit(op, bulk)
            case api.WaitStep():
                return self._runs.wait(op)
            case api.CreateRun():
                return self._runs.create(op)
            case api.Seal():
                return self._ingest.seal(op)
            case api.Flush():
                return self._ingest.flush(op)
            case api.List():
                return self._list(op)
            case api.Events():
                return self._events(op)
            case api.Pause():
                return self._runs.set_state(op.run, "paused", op.reason)
            case api.Resume():
                return self._resume(op)
            case api.Finish():
                return self._runs.set_state(op.run, "finished")
            case api.Rollback():
                return self._rollback(op)
            case api.CancelJob() | api.DiscardJob():
                return self._end(op.job, isinstance(op, api.DiscardJob))
            case api.RetryJob():
                return self._retry(op.job)
            case api.Collect():
                return self._collect(op)
            case api.Hello():
                return self._hello(op)
            case api.Shutdown():
                return self._shutdown(op)

    async def _hello(self, op: api.Hello) -> api.Answer:
        if op.protocol != PROTOCOL:
            raise Invalid(
                f"client speaks protocol {op.protocol}, this daemon {PROTOCOL}: install artd {__version__} there"
            )
        return self._welcome

    async def _shutdown(self, op: api.Shutdown) -> api.Answer:
        self._stop(op.drain_s)
        return api.Done()

    async def _collect(self, op: api.Collect) -> api.Collected:
        assert self._collector is not None
        done = await self._collector.collect(op.dry, op.resume)
        return api.Collected(stopped=done.stopped, rows=done.rows())

    async def _list(self, op: api.List) -> api.Rows:
        return api.Rows(rows=await read_rows(self._store, op))

    async def _events(self, op: api.Events) -> api.Rows:
        end = self._store.clock.monotonic() + min(op.timeout_s, 60.0)
        while True:
            changed = self._store.change()
            rows = await read_events(self._store, op)
            left = end - self._store.clock.monotonic()
            if rows or left <= 0:
                return api.Rows(rows=rows)
            with anyio.move_on_after(left):
                await changed.wait()

    async def _end(self, job: int, discard: bool) -> api.Done:
        now = self._store.clock.now_ms()
        if await self._store.write(lambda c: end_for_good(c, now, job, discard)):
            self._dispatch.cancel_running(job)
        return api.Done()

    async def _retry(self, job: int) -> api.Done:
        now = self._store.clock.now_ms()
        await self._store.write(lambda c: retry(c, now, job))
        return api.Done()

    async def _rollback(self, op: api.Rollback) -> api.Done:
        now = self._store.clock.now_ms()
        await self._store.write(lambda c: rollback(c, now, op))
        return api.Done()


def _failure(error: BaseException) -> api.Error:
    """The typed answer to any exception; what nobody foresaw is logged with its stack."""
    if isinstance(error, RequestError):
        return _error(error)
    if isinstance(error, StoreFull):
        return _error(Busy(str(error), retry_after_s=5.0))
    if is_full(error):
        return _error(
            Busy(f"the disk takes nothing more ({error}): free space; artd goes on by itself", retry_after_s=5.0)
        )
    if isinstance(error, IllegalTransition):
        return _error(Conflict(str(error)))
    log.error("a request failed", exc_info=error)
    return api.Error(
        code="failed", message=f"{type(error).__name__}: {error} (see the daemon's log: artctl logs daemon)"
    )


def _error(error: RequestError) -> api.Error:
    return api.Error(code=error.code, message=error.message, field=error.field, retry_after_s=error.retry_after_s)
