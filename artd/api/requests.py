"""Answers requests: each gets exactly one reply, and a refused one an error with a code.

`orders` carries out orders; this module answers the rest. No request ends the daemon. The reply to a change leaves after its
COMMIT.
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
from artd.rollouts.ingest import Ingest
from artd.runs.lifecycle import Runs
from artd.store.fs import is_full
from artd.store.readers import TooSlow
from artd.store.store import Store, emit
from artd.store.writer import StoreFull
from artd.training.dispatch import Dispatch
from artd_schema import PROTOCOL
from artd_schema.codec import UNREADABLE, WireError
from artd_schema.wire import client_api as api

from .listing import read_events, read_rows
from .orders import NO_NOTE, ORDERS, Handler, Parts
from .texts import READING

log = logging.getLogger(__name__)
Send = Callable[[bytes, api.Reply], object]
LOOK_S = 5.0
STILL_THERE = api.Reply(id=0, answer=api.Done())
"""Clients number their requests from 1, so this belongs to no request."""
DISCARDED = "the daemon is stopping; start it again with `artd start` and resend"


NAMES = 4096
NOTED = ORDERS.keys() - set(NO_NOTE)
"""Orders whose client an event names."""


class _Number(msgspec.Struct):
    """The part that every request has, even one that cannot be decoded otherwise."""

    id: int


class Requests:
    """Answers what the client router receives; `take` is the router's handler.

    `stop(drain_s)` asks the daemon to end. `revive()` starts broken workers again. `who(peer)` returns whose key a client of
    another machine has, "" for one of this machine.
    """

    def __init__(
        self, store: Store, ingest: Ingest, runs: Runs, dispatch: Dispatch, send: Send, stop: Callable[[float], None],
        instance: str, max_message: int, revive: Callable[[], None] = lambda: None, collector: Collector | None = None,
        under_way: UnderWay | None = None, who: Callable[[bytes], str] = lambda peer: "",
    ) -> None:  # fmt: skip
        self._who = who
        self._names: dict[bytes, str] = {}  # the names that the newest peers gave themselves
        self._under_way = under_way or UnderWay()
        self.parts = Parts(store, ingest, runs, dispatch, collector, stop, revive)
        self._store = store
        self._ingest = ingest
        self._send = send
        self._welcome = api.Welcome(
            protocol=PROTOCOL, instance=instance, version=__version__, max_message=max_message,
            window=self._under_way.window,
        )  # fmt: skip
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], bytes] = {}
        self.draining = False

    def refuse(self, peer: bytes, frames: list[bytes], error: WireError) -> None:
        """Answer a request that cannot be decoded, if at least its number can: it has a bad value, or a newer client sent it."""
        try:
            number = msgspec.msgpack.decode(frames[1], type=_Number).id
        except (IndexError, *UNREADABLE):
            return  # without a number nobody waits for an answer; the router has counted and logged it
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
        """Answer a request now or in a task of its own.

        `bulk`: the frames after the request's own. `header`: the bytes of its own frame, most of which may be a trajectory's
        metadata.
        """
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
        """Look every few seconds for clients that left, until cancelled. Only a failed send shows that a peer has gone."""
        while True:
            await anyio.sleep(LOOK_S)
            self.end_requests_of_left()

    def end_requests_of_left(self) -> None:
        """Send each waiting client a reply that belongs to no request, and end the requests of those that have gone."""
        peers = dict.fromkeys(self._waiting.values())  # in the order in which they began to wait
        left = {peer for peer in peers if self._send(peer, STILL_THERE) is False}
        for task in [task for task, peer in self._waiting.items() if peer in left]:
            task.cancel()

    def _submit_fast(self, peer: bytes, request: api.Request, op: api.Submit, bulk: list[bytes], header: int) -> bool:
        """Handle a small submission by value without a task of its own. Returns whether it did."""
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
            answer = await self.serve(request.op, bulk, header)
        except Exception as error:
            answer = _failure(error)
        self._send(peer, api.Reply(id=request.id, answer=answer))
        if type(request.op) in NOTED and not isinstance(answer, api.Error):
            await self._note(peer, request.op)

    async def _note(self, peer: bytes, op: api.Op) -> None:
        """Record who gave an order as an event. The order is already carried out, so a failure here is only logged."""
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

    def serve(self, op: api.Op, bulk: list[bytes], header: int = 0) -> Awaitable[api.Answer]:
        """Return the answer to a request. Raises a RequestError of `artd.errors` when it is refused."""
        if isinstance(op, api.Submit):
            return self._ingest.submit(op, bulk, header)
        if isinstance(op, api.Hello):
            return self._hello(op)
        return HANDLERS[type(op)](self.parts, op)

    async def _hello(self, op: api.Hello) -> api.Answer:
        if op.protocol != PROTOCOL:
            raise Invalid(
                f"client speaks protocol {op.protocol}, this daemon {PROTOCOL}: install artd {__version__} there"
            )
        return self._welcome


async def create_run(parts: Parts, op: api.CreateRun) -> api.Answer:
    return await parts.runs.create(op)


async def wait_step(parts: Parts, op: api.WaitStep) -> api.Answer:
    return await parts.runs.wait(op)


async def seal(parts: Parts, op: api.Seal) -> api.Answer:
    return await parts.ingest.seal(op)


async def list_rows(parts: Parts, op: api.List) -> api.Answer:
    return await read_rows(parts.store, op)


async def events(parts: Parts, op: api.Events) -> api.Answer:
    store = parts.store
    end = store.clock.monotonic() + min(op.timeout_s, 60.0)
    while True:
        changed = store.change()
        found = await read_events(store, op)
        left = end - store.clock.monotonic()
        if found.rows or left <= 0:
            return found
        with anyio.move_on_after(left):
            await changed.wait()


HANDLERS: dict[type[api.Op], Handler] = (
    ORDERS
    | {
        api.CreateRun: create_run,
        api.WaitStep: wait_step,
        api.Seal: seal,
        api.List: list_rows,
        api.Events: events,
    }
    | READING
)
"""Handlers of all messages but Hello and Submit, which need more than the message."""


def _failure(error: BaseException) -> api.Error:
    """Return the answer that describes an exception. An unforeseen one is logged with its stack."""
    if isinstance(error, RequestError):
        return _error(error)
    if isinstance(error, StoreFull):
        return _error(Busy(str(error), retry_after_s=5.0))
    if is_full(error):
        return _error(Busy(f"the disk has no room ({error}): free space; artd continues by itself", retry_after_s=5.0))
    if isinstance(error, TooSlow):
        return _error(Busy(f"{error}: ask for fewer rows (limit), and for the next ones by `before` or `after`"))
    if is_scarce(error):
        return _error(
            Busy(f"the daemon has no file descriptor left ({error}); it continues by itself", retry_after_s=1.0)
        )
    if isinstance(error, IllegalTransition):
        return _error(Conflict(str(error)))
    log.error("a request failed", exc_info=error)
    return api.Error(
        code="failed", message=f"{type(error).__name__}: {error} (see the daemon's log: artctl logs daemon)"
    )


def _error(error: RequestError) -> api.Error:
    return api.Error(code=error.code, message=error.message, field=error.field, retry_after_s=error.retry_after_s)
