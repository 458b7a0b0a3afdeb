"""ZeroMQ ROUTER sockets: messages in, messages out, and who is still there.

Owner of: one ROUTER per socket and the list of its peers. Invariants: everything that arrived is read without waiting for more news (the
descriptor is edge-triggered, so it is looked at again after every send); a peer that is gone is an answer (False), never a
silent drop (ROUTER_MANDATORY); on a `Local` endpoint only this user's processes may connect.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import zmq

from artd_schema import worker as w
from artd_schema.codec import Codec, WireError

log = logging.getLogger(__name__)
In = TypeVar("In")
DRAIN = 256
NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: an enum's `|` costs more than sending a frame
POLLIN = int(zmq.POLLIN)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


Refuse = Callable[[bytes, list[bytes], WireError], None]


class Endpoint(Protocol):
    """Where a ROUTER listens, and who may connect. `address`: for ZeroMQ."""

    address: str

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Set what guards the endpoint, then bind. Errors: zmq.ZMQError."""

    def close(self) -> None:
        """The socket is closed: take back what `listen` made."""


class Local:
    """A Unix socket for processes of this user: 0600 in a 0700 folder, and the kernel's word for the peer's uid."""

    def __init__(self, path: Path) -> None:
        self.address = f"ipc://{path}"
        self._path = path

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """The data folder's lock guarantees that no other daemon holds this path."""
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._path.unlink(missing_ok=True)
        socket.bind(self.address)
        self._path.chmod(0o600)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class Router(Generic[In]):
    """One bound ROUTER. `handler(peer, message, bulk)` is called in the loop for every message, `refuse(peer, frames,
    error)` for what cannot be decoded; neither may block."""

    def __init__(
        self, at: Endpoint, codec: Codec[In], max_message: int, handler: Callable[[bytes, In, list[bytes]], None],
        refuse: Refuse | None = None,
    ) -> None:  # fmt: skip
        self.endpoint = at.address
        self._at = at
        self._codec = codec
        self._max_message = max_message
        self._handler = handler
        self._refuse = refuse
        self._context = zmq.Context()
        # The I/O thread must not push the loop off its core at every message (on two cores that halved the rate).
        self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        self.undecodable = 0

    def bind(self) -> None:
        """Bind the socket. Errors: zmq.ZMQError."""
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * self._max_message)  # a fuse: clients refuse larger ones by themselves
        self._at.listen(socket)
        self.endpoint = self._at.address  # a port 0 has become one
        self._socket: zmq.Socket[bytes] = socket
        self._news = asyncio.Event()
        self._news.set()
        self._looking = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.FD, self._news.set)

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            for _ in range(DRAIN):
                try:
                    frames = self._receive()
                except zmq.Again:
                    break
                self._take(frames)
            else:
                self._news.set()  # perhaps there is more
            await anyio.lowlevel.checkpoint()

    def _receive(self) -> list[bytes]:
        """One message. Not recv_multipart, which asks the socket after each frame for more, at twice the cost."""
        receive = self._socket.recv
        frame = receive(NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = receive(NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames

    def _take(self, frames: list[bytes]) -> None:
        peer = frames[0]
        try:
            message, bulk = self._codec.decode(frames[1:])
        except WireError as error:
            self.undecodable += 1
            log.warning("%s sent a message that cannot be decoded: %s", peer.decode(errors="replace"), error)
            if self._refuse is not None:
                self._refuse(peer, frames[1:], error)
            return
        self._handler(peer, message, bulk)

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """Whether the message was handed to the peer's queue; False when the peer is gone or does not read."""
        frames = self._codec.encode(message, bulk)
        last = frames.pop()
        try:
            self._socket.send(peer, NOBLOCK_MORE)
            for frame in frames:
                self._socket.send(frame, NOBLOCK_MORE)
            self._socket.send(last, NOBLOCK)
        except (zmq.Again, zmq.ZMQError) as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            # The descriptor tells of changes only, and a send eats the news of what has arrived meanwhile.
            if not self._looking:
                self._looking = True
                self._loop.call_soon(self._look)
        return True

    def _look(self) -> None:
        self._looking = False
        if not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
            self._news.set()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._at.close()
        self._context.term()


class Peers(Protocol):
    """Whatever reaches peers: a Router, or a test's own wire."""

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """See Router.send."""


class WorkerWire:
    """Sends to workers by name; which peer a name is, `register` says (its Hello was accepted)."""

    def __init__(self, router: Peers) -> None:
        self.router = router
        self._peers: dict[str, tuple[bytes, int]] = {}
        self._runs: dict[str, int | None] = {}

    def register(self, name: str, spawn: int, peer: bytes, run: int | None) -> None:
        """run: the one that its Welcome named."""
        self._peers[name] = (peer, spawn)
        self._runs[name] = run

    def forget(self, name: str, spawn: int) -> None:
        if self.spawn(name) == spawn:
            del self._peers[name]

    def spawn(self, name: str) -> int | None:
        """Which process of this worker is connected, or None."""
        known = self._peers.get(name)
        return known[1] if known else None

    def run(self, name: str) -> int | None:
        """The run that the connected process works for: it was told of no other."""
        return self._runs[name] if name in self._peers else None

    def who(self, peer: bytes) -> tuple[str, int] | None:
        """(name, spawn) of a registered peer."""
        return next(((name, spawn) for name, (known, spawn) in self._peers.items() if known == peer), None)

    def answer(self, peer: bytes, message: w.ToWorker) -> bool:
        """As `send`, to a process that is not, or no longer, registered."""
        return self.router.send(peer, message)

    def send(self, name: str, message: w.ToWorker, bulk: Sequence[bytes] = ()) -> bool:
        """Whether the message was handed over; False when the worker is not connected."""
        known = self._peers.get(name)
        return known is not None and self.router.send(known[0], message, bulk)
