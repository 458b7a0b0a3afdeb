"""ZeroMQ ROUTER sockets: messages in, messages out, and who is still there.

Owner of: one ROUTER per socket and the list of its peers. Invariants: everything that arrived is read without waiting for more news (the
descriptor is edge-triggered, so it is looked at again after every send); a peer that is gone is an answer (False), never a
silent drop (ROUTER_MANDATORY); on a `Local` endpoint only this user's processes may connect; an endpoint that is shut keeps the
connections it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import zmq
from zmq.utils.monitor import recv_monitor_message

from artd_schema import worker as w
from artd_schema.codec import Codec, WireError

from .descriptors import EVENTS, Door, Watch
from .under_way import UnderWay

log = logging.getLogger(__name__)
In = TypeVar("In")
DRAIN = 256
LISTENERS = 8
"""A socket whose file was removed so often gives up the oldest listener, and who came by it has to connect again."""
BACKLOG = 64
"""Those that wait here are let in after an endpoint was shut."""
HANDSHAKE_MS = 10_000
"""A process of this machine that connects and says nothing is not kept longer."""
NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: an enum's `|` costs more than sending a frame
POLLIN = int(zmq.POLLIN)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


Refuse = Callable[[bytes, list[bytes], WireError], None]


class NotAllowed(WireError):
    """A message of somebody who may not send any, or no longer."""


class OverLimit(WireError):
    """A message with more bytes, all frames together, than one may have."""


class Endpoint(Door, Protocol):
    """Where a ROUTER listens, and who may connect. address: for ZeroMQ; share: see descriptors.Watch.add."""

    address: str
    share: float

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Set what guards the endpoint, then bind. Errors: zmq.ZMQError."""

    def listens(self, descriptor: int) -> None:
        """This is the listening socket, which is ZeroMQ's."""

    def close(self) -> None:
        """The socket is closed: take back what `listen` made."""


class Local:
    """A Unix socket for processes of this user: 0600 in a 0700 folder, and the kernel's word for the peer's uid. It is shut by
    another name: what is connected stays so, which it would not when ZeroMQ unbinds."""

    share = 1.0

    def __init__(self, path: Path) -> None:
        self.address = f"ipc://{path}"
        self._path = path
        self._bound: list[str] = []
        self._times = 0
        self._inode = 0
        self._shut = False
        self._moving = threading.Lock()

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """The data folder's lock guarantees that no other daemon holds this path. Bound under a name of its own and renamed: libzmq
        may remove the file of a name when it closes its listener. An older listener stays: unbinding it would end every
        connection that came by it."""
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._times += 1
        fresh = self._path.with_name(f"{self._path.name}.{self._times}")
        fresh.unlink(missing_ok=True)
        socket.bind(f"ipc://{fresh}")
        self._bound.append(f"ipc://{fresh}")
        if len(self._bound) > LISTENERS:
            socket.unbind(self._bound.pop(0))
        fresh.chmod(0o600)
        with self._moving:
            self._inode = fresh.stat().st_ino
            fresh.replace(self._place())
            if not self._shut:
                self._away().unlink(missing_ok=True)  # of a daemon that was killed

    def lost(self) -> bool:
        """Whether somebody has removed or replaced the file, so that nobody new can connect."""
        with self._moving:
            try:
                return self._place().lstat().st_ino != self._inode
            except (FileNotFoundError, NotADirectoryError):
                return True

    def move(self, path: Path) -> None:
        """The next `listen` is there."""
        with self._moving:
            self.address, self._path = f"ipc://{path}", path

    def listens(self, descriptor: int) -> None:
        """Nothing is needed of it."""

    def shut(self) -> None:
        self._set_shut(True)

    def open(self) -> None:
        self._set_shut(False)

    def _set_shut(self, shut: bool) -> None:
        with self._moving:
            before, self._shut = self._place(), shut
            with contextlib.suppress(OSError):  # somebody removed it: `lost` sees that
                before.rename(self._place())

    def _place(self) -> Path:
        """Where the socket's file is: nobody finds that of a socket that is shut."""
        return self._away() if self._shut else self._path

    def _away(self) -> Path:
        return self._path.with_name(f"{self._path.name}.shut")

    def close(self) -> None:
        with self._moving:
            self._place().unlink(missing_ok=True)


class Router(Generic[In]):
    """One bound ROUTER. `handler(peer, message, bulk)` is called in the loop for every message, `refuse(peer, frames,
    error)` for what cannot be decoded or is too large (then without its bulk); neither may block. max_message: bytes, all frames of
    one message together; under_way: while it is full nothing is read; waiting: messages of one peer that ZeroMQ holds meanwhile; admit(peer, key): whether the
    key by which the peer has connected is still allowed."""

    def __init__(
        self, at: Endpoint, codec: Codec[In], max_message: int, handler: Callable[[bytes, In, list[bytes]], None],
        refuse: Refuse | None = None, under_way: UnderWay | None = None, waiting: int = 10_000,
        admit: Callable[[bytes, str], bool] | None = None,
    ) -> None:  # fmt: skip
        self._admit = admit
        self._under_way = under_way
        self._waiting = waiting
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
        self.header = 0  # bytes of the header of the message that the handler has
        self._key = ""

    def bind_again(self) -> None:
        """Listen where `at` is now, and there alone; who is connected stays so. Errors: OSError, zmq.ZMQError."""
        self._at.listen(self._socket)
        self.endpoint = self._at.address

    def bind(self, watch: Watch | None = None) -> None:
        """Bind the socket. watch: who shuts the endpoint when descriptors get scarce. Errors: zmq.ZMQError."""
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.RCVHWM, self._waiting)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message)  # of one frame; `_receive` looks at the sum
        monitor = socket.get_monitor_socket(EVENTS) if watch is not None else None
        self._at.listen(socket)
        if watch is not None and monitor is not None:
            self._at.listens(int(recv_monitor_message(monitor)["value"]))  # the first event: it listens
            watch.add(self._at, monitor, self._at.share)
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
                if self._under_way is not None and self._under_way.full:
                    await self._under_way.room()
                try:
                    frames, size = self._receive()
                except zmq.Again:
                    break
                self._take(frames, size)
            else:
                self._news.set()  # perhaps there is more
            await anyio.lowlevel.checkpoint()

    def _receive(self) -> tuple[list[bytes], int]:
        """The frames of one message, and its bytes: of one that is too large the first three frames alone (peer, magic, header).
        Not recv_multipart, which asks the socket after each frame for more, at twice the cost."""
        receive = self._socket.recv
        frame = receive(NOBLOCK, copy=False)
        frames, size = [frame.bytes], 0
        self._key = str(frame.get("User-Id")) if self._admit is not None else ""
        while frame.more:
            frame = receive(NOBLOCK, copy=False)
            size += len(frame)
            if size <= self._max_message or len(frames) < 3:
                frames.append(frame.bytes)
        return frames, size

    def _take(self, frames: list[bytes], size: int) -> None:
        peer = frames[0]
        try:
            if self._admit is not None and not self._admit(peer, self._key):
                raise NotAllowed("this client's key was removed; `artctl key add` allows one")
            if size > self._max_message:
                del frames[3:]
                raise OverLimit(f"the message has {size} bytes, the daemon takes {self._max_message}")
            message, bulk = self._codec.decode(frames[1:])
        except WireError as error:
            self.undecodable += 1
            log.warning("%s sent a message that cannot be taken: %s", peer.decode(errors="replace"), error)
            if self._refuse is not None:
                self._refuse(peer, frames[1:], error)
            return
        self.header = len(frames[2])
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
        self._socket.disable_monitor()
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
