"""What clients ask: each request is answered by exactly one reply, errors by their code.

Owner of: nothing; the services own the rows. Invariants: nothing a client sends ends the daemon; a reply to a change
leaves after its COMMIT.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from artd import __version__
from artd.core.states import IllegalTransition
from artd.errors import Busy, Conflict, Draining, Invalid, RequestError
from artd.net.descriptors import is_scarce
from artd.net.router import NotAllowed, OverLimit
from artd.net.under_way import UnderWay
from artd.retention.collector import Collector
from artd.retention.deletion import mark
from artd.rollouts.ingest import Ingest
from artd.runs.lifecycle import Runs
from artd.runs.rollback import rollback
from artd.store.fs import is_full
from artd.store.readers import TooSlow
from artd.store.store import Store, emit
from artd.store.writer import StoreFull
from artd.training.dispatch import Dispatch
from artd_schema import PROTOCOL
from artd_schema import client_api as api
from artd_schema.codec import UNREADABLE, WireError

from .group_orders import discard_group
from .job_orders import end_for_good, retry
from .listing import read_events, read_rows

log = logging.getLogger(__name__)
Send = Callable[[bytes, api.Reply], object]
LOOK_S = 5.0
STILL_THERE = api.Reply(id=0, answer=api.Done())
"""Clients number their requests from 1 on."""
DISCARDED = "the daemon is stopping; start it again with `artd start` and resend"


ORDERS = (
    api.Pause, api.Resume, api.Finish, api.Rollback, api.CancelJob, api.DiscardJob, api.RetryJob, api.DeleteRun, api.Flush,
)  # fmt: skip
"""What an operator does: events say who did it."""
NAMES = 4096


class _Number(msgspec.Struct):
    """What every request has, whatever else is in it."""

    id: int


class Requests:
    """`take` is the client router's handler. stop(drain_s): asks the daemon to end; revive: starts broken workers again;
    who(peer): whose key a client of another machine has, "" for those of this one."""

    def __init__(
        self, store: Store, ingest: Ingest, runs: Runs, dispatch: Dispatch, send: Send, stop: Callable[[float], None],
        instance: str, max_message: int, revive: Callable[[], None] = lambda: None, collector: Collector | None = None,
        under_way: UnderWay | None = None, who: Callable[[bytes], str] = lambda peer: "",
    ) -> None:  # fmt: skip
        self._who = who
        self._names: dict[bytes, str] = {}  # of the newest peers, by their own word
        self._under_way = under_way or UnderWay()
        self._collector = collector
        self._revive = revive
        self._store = store
        self._ingest = ingest
        self._runs = runs
        self._dispatch = dispatch
        self._send = send
        self._stop = stop
        self._welcome = api.Welcome(
            protocol=PROTOCOL, instance=instance, version=__version__, max_message=max_message,
            window=self._under_way.window,
        )  # fmt: skip
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], bytes] = {}
        self.draining = False

    async def _resume(self, op: api.Resume) -> api.Answer:
        """Workers that were given up are started again once it is clear that there is a run for them."""
        answer = await self._runs.set_state(op.run, "active", request=op.request)
        self._revive()
        return answer

    def refuse(self, peer: bytes, frames: list[bytes], error: WireError) -> None:
        """Answer a request that cannot be decoded, when it at least has a number: a bad value, or a newer client."""
        try:
            number = msgspec.msgpack.decode(frames[1], type=_Number).id
        except (IndexError, *UNREADABLE):
            return  # nobody waits for an answer to this; the router counted and logged it
        if isinstance(error, NotAllowed):
            self._send(peer, api.Reply(id=number, answer=api.Error(code="not_allowed", message=str(error))))
            return
        if isinstance(error, OverLimit):
            what = (
                f"{error}: split the trajectory, submit it by reference, or raise limits.max_message_mib in artd.toml"
            )
            self._send(peer, api.Reply(id=number, answer=api.Error(code="too_large", message=what)))
            return
        text, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`").removeprefix("op.")
        message = f"{field}: {text}" if field else f"the request cannot be read: {text}"
        self._send(peer, api.Reply(id=number, answer=_error(Invalid(message, field=field))))

    def take(self, peer: bytes, request: api.Request, bulk: list[bytes], header: int = 0) -> None:
        """header: bytes of the frame that the request came in; metadata may be most of the message."""
        size = header + sum(map(len, bulk))
        self._under_way.take(size)
        if (
            isinstance(request.op, api.Submit)
            and not self.draining
            and self._submit_fast(peer, request, request.op, bulk, header)
        ):
            return
        task = asyncio.ensure_future(self._answer(peer, request, bulk, header))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._under_way.give(size))
        if isinstance(request.op, api.WaitStep | api.Events):
            self._waiting[task] = peer
            task.add_done_callback(self._waiting.pop)

    async def run(self) -> None:
        """End the waits of clients that left, until cancelled: nothing but a message tells that a peer has gone."""
        while True:
            await anyio.sleep(LOOK_S)
            self.end_left()

    def end_left(self) -> None:
        """Ask each client that waits whether it is there, by a reply that belongs to no request of its."""
        peers = set(self._waiting.values())
        left = {peer for peer in peers if self._send(peer, STILL_THERE) is False}
        for task in [task for task, peer in self._waiting.items() if peer in left]:
            task.cancel()

    def _submit_fast(self, peer: bytes, request: api.Request, op: api.Submit, bulk: list[bytes], header: int) -> bool:
        """Small submits by value need no task of their own."""
        size = header + sum(map(len, bulk))

        def answer(outcome: api.Answer | BaseException) -> None:
            self._under_way.give(size)
            self._reply(peer, request.id, outcome)

        try:
            return self._ingest.submit_now(op, bulk, answer, header)
        except Exception as error:
            answer(error)
            return True

    def _reply(self, peer: bytes, number: int, outcome: api.Answer | BaseException) -> None:
        answer = _failure(outcome) if isinstance(outcome, BaseException) else outcome
        self._send(peer, api.Reply(id=number, answer=answer))

    async def _answer(self, peer: bytes, request: api.Request, bulk: list[bytes], header: int) -> None:
        try:
            if self.draining and not isinstance(request.op, api.Hello | api.List | api.Shutdown):
                raise Draining(DISCARDED)
            if isinstance(request.op, api.Hello):
                self._remember(peer, request.op.client)
            answer = await self._serve(request.op, bulk, header)
        except Exception as error:
            answer = _failure(error)
        self._send(peer, api.Reply(id=request.id, answer=answer))
        if isinstance(request.op, ORDERS) and not isinstance(answer, api.Error):
            await self._note(peer, request.op)

    async def _note(self, peer: bytes, op: api.Op) -> None:
        """Keep who gave an order, as an event. What was ordered is done: nothing here may undo that."""
        what, who = type(op).__name__.lower(), self._who(peer) or self._names.get(peer, "a client")
        run, job, now = getattr(op, "run", ""), getattr(op, "job", None), self._store.clock.now_ms()
        try:
            await self._store.write(
                lambda c: emit(c, now, run, "client.ordered", run if job is None else job, order=what, client=who)
            )
        except StoreFull as error:
            log.warning("%s by %s has no event: %s", what, who, error)

    def _remember(self, peer: bytes, client: str) -> None:
        if len(self._names) >= NAMES:
            del self._names[next(iter(self._names))]
        self._names[peer] = client[:64]

    def _serve(self, op: api.Op, bulk: list[bytes], header: int = 0) -> Awaitable[api.Answer]:
        match op:
            case api.Submit():
                return self._ingest.submit(op, bulk, header)
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
                return self._runs.set_state(op.run, "paused", op.reason, op.request)
            case api.Resume():
                return self._resume(op)
            case api.Finish():
                return self._runs.set_state(op.run, "finished")
            case api.DeleteRun():
                return self._delete(op)
            case api.Rollback():
                return self._rollback(op)
            case api.CancelJob() | api.DiscardJob():
                return self._end(op.job, isinstance(op, api.DiscardJob))
            case api.DiscardGroup():
                return self._discard_group(op)
            case api.RetryJob():
                return self._retry(op)
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
        return await read_rows(self._store, op)

    async def _events(self, op: api.Events) -> api.Rows:
        end = self._store.clock.monotonic() + min(op.timeout_s, 60.0)
        while True:
            changed = self._store.change()
            found = await read_events(self._store, op)
            left = end - self._store.clock.monotonic()
            if found.rows or left <= 0:
                return found
            with anyio.move_on_after(left):
                await changed.wait()

    async def _end(self, job: int, discard: bool) -> api.Done:
        now = self._store.clock.now_ms()
        if await self._store.write(lambda c: end_for_good(c, now, job, discard)):
            self._dispatch.cancel_running(job)
        return api.Done()

    async def _discard_group(self, op: api.DiscardGroup) -> api.Done:
        now = self._store.clock.now_ms()
        await self._store.write(lambda c: discard_group(c, now, op.run, op.group))
        return api.Done()

    async def _retry(self, op: api.RetryJob) -> api.Done:
        now = self._store.clock.now_ms()
        await self._store.write(lambda c: retry(c, now, op.job, op.request))
        return api.Done()

    async def _delete(self, op: api.DeleteRun) -> api.Done:
        now = self._store.clock.now_ms()
        done = await self._store.write(lambda c: mark(c, now, op))
        self._ingest.forget(op.run)
        return done

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
    if isinstance(error, TooSlow):
        return _error(Busy(f"{error}: ask for fewer rows (limit), and for the next ones by `before` or `after`"))
    if is_scarce(error):
        return _error(
            Busy(f"the daemon has no file descriptor left ({error}); it goes on by itself", retry_after_s=1.0)
        )
    if isinstance(error, IllegalTransition):
        return _error(Conflict(str(error)))
    log.error("a request failed", exc_info=error)
    return api.Error(
        code="failed", message=f"{type(error).__name__}: {error} (see the daemon's log: artctl logs daemon)"
    )


def _error(error: RequestError) -> api.Error:
    return api.Error(code=error.code, message=error.message, field=error.field, retry_after_s=error.retry_after_s)
