"""Sends requests and receives answers over a connection that may break and come back.

A call ends exactly once: with its answer, an error or its time-out. A cancelled call leaves nothing behind, and a late or
second answer to it is ignored. After a reconnect every unanswered call is sent again, with the same number and the same key or
request id. No message above the daemon's `max_message` is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from artd_schema import PROTOCOL
from artd_schema.codec import Codec, WireError
from artd_schema.crashpoint import reach
from artd_schema.wire import client_api as api

from . import address
from .address import Remote
from .errors import (
    ArtdError,
    Busy,
    Closed,
    DaemonNotRunning,
    Draining,
    Failed,
    Invalid,
    NotAllowed,
    TimedOut,
    TooLarge,
    WrongProtocol,
    from_answer,
)
from .link import Link

log = logging.getLogger(__name__)
A = TypeVar("A", bound=api.Answer)

SMALL = 64 * 1024
"""A message of at most so many bytes never waits for the window, and may overtake larger ones."""
BUSY_S = 0.25
"""The shortest time before a busy daemon is asked again."""
HELLO_S = 5.0
QUIET_S = 5.0
DEAD_S = 15.0
TICK_S = 0.25
BACKOFF_S = (0.02, 0.2)


@dataclass(slots=True, eq=False)
class _Call:
    """A call under way. `counted`: its bytes count towards the window; `refused`: the error of a stopping or busy daemon."""

    op: api.Op
    frames: list[bytes]
    deadline: float
    future: asyncio.Future[api.Answer]
    size: int
    sent: bool = False
    counted: bool = False
    refused: ArtdError | None = None


class Connection:
    """`data`: the daemon's data folder, or its address on another machine. `timeout`: seconds a request may take, reconnects
    included."""

    def __init__(self, data: Path | Remote, timeout: float) -> None:
        self.data = data
        self.timeout = timeout
        self.welcome: api.Welcome | None = None
        self._codec = Codec[api.Reply](api.Reply)
        self._numbers = count(1)
        self._calls: dict[int, _Call] = {}
        self._under_way = 0  # bytes of large messages that were sent and not answered
        self._held: deque[_Call] = deque()  # large messages that wait for the window
        self._link: Link | None = None
        self._greeting = 0  # number of the Hello that the present link has sent
        self._ready = False
        self._end: ArtdError | None = Closed("this client is not open; use `async with Client() as art:`")
        self._why: ArtdError | None = None
        self._ticker: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connect. Raises DaemonNotRunning at once when no daemon is alive, WrongProtocol when it speaks another protocol."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # SCHED_BATCH: else the I/O thread preempts the sending thread at every message.
        self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        self._heard = self._pinged = self._loop.time()
        self._gone = asyncio.Event()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._end = None
        self._task = asyncio.create_task(self._keep(), name="artd-client")
        try:
            async with asyncio.timeout(self.timeout):
                await asyncio.shield(self._first)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError) and not isinstance(error, ArtdError):
                raise self._late() from None
            raise

    async def close(self) -> None:
        """End every call with Closed and drop the connection. Closing twice is fine."""
        if isinstance(self._end, Closed):
            return
        self._end = Closed("this client is closed")
        self._task.cancel()
        if self._link is not None:
            self._link.close()
        if self._ticker is not None:
            self._ticker.cancel()
        if not self._first.done():
            self._first.cancel()
        self._fail_all(self._end)
        self._context.destroy(0)
        await asyncio.gather(
            self._task, return_exceptions=True
        )  # last, because in a cancelled scope nothing after it runs

    async def ask(
        self,
        op: api.Op,
        kind: type[A],
        bulk: Sequence[bytes] = (),
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> A:
        """Return the answer to `op`, which must be of type `kind`. Raises ArtdError."""
        return expect(op, await self.call(op, bulk, timeout), kind)

    async def call(
        self,
        op: api.Op,
        bulk: Sequence[bytes] = (),
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> api.Answer:
        """Return the answer to `op` within `timeout` seconds. It may be cancelled at any moment. Raises ArtdError."""
        if self._end is not None:
            raise self._end
        if isinstance(op, api.Order) and not op.request:
            op = msgspec.structs.replace(op, request=uuid.uuid4().hex)
        number = next(self._numbers)
        frames = self._encode(number, op, bulk)
        self._check_size(frames)
        now = self._loop.time()
        deadline = now + (self.timeout if timeout is None else timeout)
        entry = _Call(op, frames, deadline, self._loop.create_future(), sum(map(len, frames)))
        if not self._calls:
            self._heard = self._pinged = now  # silence counts from the first open call
        self._calls[number] = entry
        if self._ready:
            self._transmit(entry)
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK_S, self._tick)
        try:
            return await entry.future
        finally:
            self._calls.pop(number, None)
            self._release(entry)

    # ---- the connection -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause = BACKOFF_S[0]
        try:
            while True:
                try:
                    if await self._session():
                        pause = BACKOFF_S[0]
                except DaemonNotRunning as error:
                    self._why = error
                    if not self._first.done() and not isinstance(error, address.Starting):
                        self._first.set_exception(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, BACKOFF_S[1])
        except Exception as error:
            self._break(error if isinstance(error, ArtdError) else Failed(f"the connection broke: {error!r}"))

    def _break(self, error: ArtdError) -> None:
        """Give the connection up: this error ends every present and later call."""
        self._end = error
        self._fail_all(error)
        if not self._first.done():
            self._first.set_exception(error)

    async def _session(self) -> bool:
        """Connect and serve until the connection ends. Returns whether the daemon welcomed us.

        Raises DaemonNotRunning, NotAllowed for an unknown key, and WrongProtocol when the daemon refuses this client.
        """
        endpoint = address.endpoint(self.data)
        self._gone.clear()
        self._refusal: ArtdError | None = None
        remote = self.data if isinstance(self.data, Remote) else None
        self._link = link = Link(self._context, endpoint, self._take, self._gone.set, remote)
        silent = self._loop.call_later(HELLO_S, self._give_up_silent)
        try:
            self._heard = self._pinged = self._loop.time()
            self._hello()
            await self._gone.wait()
        finally:
            silent.cancel()
            welcomed, self._ready = self._ready, False
            self._link = None
            link.close()
        if self._refusal is not None:
            raise self._refusal
        if link.refused:
            raise NotAllowed(f"{endpoint} does not know this client's key; `artctl key add` there allows it")
        self._why = address.not_running(self.data, "no daemon answers")
        for entry in list(self._calls.values()):
            if entry.sent and isinstance(entry.op, api.Shutdown) and not entry.future.done():
                entry.future.set_result(api.Done())  # the daemon is gone, as the call demanded
        return welcomed

    def _hello(self) -> None:
        self._greeting = next(self._numbers)
        hello = api.Hello(protocol=PROTOCOL, client=f"python-{os.getpid()}")
        self._put(self._codec.encode(api.Request(id=self._greeting, op=hello)))

    def _give_up_silent(self) -> None:
        if not self._ready:
            self._gone.set()

    def _put(self, frames: Sequence[bytes]) -> None:
        assert self._link is not None
        if self._link.closed:  # the session will notice, and send every call again or end it
            return
        try:
            self._link.send(frames)
            reach("client.sent")
        except zmq.ZMQError as error:
            log.warning("sending failed, connecting anew: %s", error)
            self._gone.set()

    def _take(self, frames: list[bytes]) -> None:
        try:
            reply, _ = self._codec.decode(frames)
        except WireError as error:
            self._refuse(f"the daemon sent a message that this client cannot read: {error}")
            return
        self._heard = self._pinged = self._loop.time()
        if reply.id == self._greeting:
            self._take_welcome(reply.answer)
            return
        entry = self._calls.get(reply.id)
        if entry is None or entry.future.done():
            return
        if not isinstance(reply.answer, api.Error):
            entry.future.set_result(reply.answer)
            return
        refusal = from_answer(reply.answer)
        if isinstance(refusal, Draining):  # it did nothing; the next daemon gets the call, if one starts in time
            self._put_off(entry, refusal)
        elif isinstance(refusal, Busy) and (wait := max(refusal.retry_after, BUSY_S)) < entry.deadline - self._heard:
            self._put_off(entry, refusal)
            self._loop.call_later(wait, self._again, reply.id)
        else:
            entry.future.set_exception(refusal)

    def _put_off(self, entry: _Call, refusal: ArtdError) -> None:
        entry.sent, entry.refused = False, refusal
        self._release(entry)

    def _again(self, number: int) -> None:
        """Send a call again that a busy daemon refused."""
        entry = self._calls.get(number)
        if entry is None or entry.sent or entry.future.done():
            return
        if self._ready and entry not in self._held:  # after a restart the call may already wait for the window
            self._transmit(entry)

    def _take_welcome(self, answer: api.Answer) -> None:
        if isinstance(answer, api.Error) and answer.code in ("busy", "draining"):
            self._gone.set()
        elif isinstance(answer, api.Error) and answer.code == "not_allowed":
            self._refusal = from_answer(answer)
            self._gone.set()
        elif isinstance(answer, api.Error):
            self._refuse(answer.message)
        elif not isinstance(answer, api.Welcome) or answer.protocol != PROTOCOL:
            self._refuse(f"this client speaks protocol {PROTOCOL}, the daemon answered {answer!r}")
        elif not self._ready:
            self.welcome = answer
            self._ready = True
            self._under_way = 0
            self._held.clear()
            for entry in list(self._calls.values()):
                entry.counted = False
                self._transmit(entry)
            if not self._first.done():
                self._first.set_result(None)

    def _refuse(self, why: str) -> None:
        self._refusal = WrongProtocol(f"{why}; client and daemon must be of the same artd")
        self._gone.set()

    # ---- calls ------------------------------------------------------------------------------------------------------------

    def _transmit(self, entry: _Call) -> None:
        if entry.counted:  # it was sent already
            return
        try:
            self._check_size(entry.frames)  # another daemon may have another limit
        except TooLarge as error:
            _fail(entry, error)
            return
        if entry.size > SMALL:
            if not self._fits(entry):
                self._held.append(entry)
                return
            entry.counted = True
            self._under_way += entry.size
        entry.sent = True
        self._put(entry.frames)

    def _fits(self, entry: _Call) -> bool:
        """Return whether the daemon's window has room for a large message. A message always fits when none is under way."""
        assert self.welcome is not None
        window = self.welcome.window
        return not window or not self._under_way or self._under_way + entry.size <= window

    def _release(self, entry: _Call) -> None:
        """Free the window's bytes of a call that is answered or given up, and send calls that wait for them."""
        if not entry.counted:
            return
        entry.counted = False
        self._under_way -= entry.size
        while self._held and self._ready:
            if not self._held[0].future.done():
                if not self._fits(self._held[0]):
                    return
                self._transmit(self._held[0])
            self._held.popleft()

    def _encode(self, number: int, op: api.Op, bulk: Sequence[bytes]) -> list[bytes]:
        try:
            return self._codec.encode(api.Request(id=number, op=op), bulk)
        except (TypeError, ValueError, OverflowError) as error:
            raise Invalid(f"{type(op).__name__}: {error}; numbers, texts, lists and dicts can be sent") from error

    def _check_size(self, frames: Sequence[bytes]) -> None:
        size = sum(map(len, frames))
        if self.welcome is not None and size > self.welcome.max_message:
            limit = self.welcome.max_message
            raise TooLarge(
                f"the message has {size} bytes, the daemon takes {limit}: split the trajectory, submit it by reference, "
                "or raise limits.max_message_mib in artd.toml",
                size=size,
                limit=limit,
            )

    def _tick(self) -> None:
        """End calls whose time is over, and send a Hello to a daemon that is silent while calls wait."""
        now = self._loop.time()
        for entry in list(self._calls.values()):
            if entry.deadline <= now:
                _fail(entry, self._late(entry.refused))
        self._ticker = self._loop.call_later(TICK_S, self._tick) if self._calls else None
        if not self._calls or not self._ready:
            return
        if now - self._heard >= DEAD_S:
            log.warning("the daemon on %s has been silent for %.0f s, connecting anew", self.data, now - self._heard)
            self._gone.set()
        elif now - self._pinged >= QUIET_S:
            self._pinged = now
            self._hello()

    def _late(self, refused: ArtdError | None = None) -> ArtdError:
        if not self._ready and self._why is not None:
            return self._why
        return refused or TimedOut(f"the daemon on {self.data} did not answer in time; see `artctl status`")

    def _fail_all(self, error: ArtdError) -> None:
        for entry in list(self._calls.values()):
            _fail(entry, error)


def expect(op: api.Op, answer: api.Answer, kind: type[A]) -> A:
    """Return the answer, which must be of type `kind`. Raises WrongProtocol."""
    if not isinstance(answer, kind):
        raise WrongProtocol(f"{type(op).__name__} was answered by {type(answer).__name__}, not by {kind.__name__}")
    return answer


def _fail(entry: _Call, error: ArtdError) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)
