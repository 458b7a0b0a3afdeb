"""Sends and receives messages on ZeroMQ ROUTER sockets, and knows which peers are connected.

Owns one ROUTER per socket and the list of its peers. It reads everything that arrived without waiting for another event
(the descriptor is edge-triggered, so it is checked again after every send). A send to a peer that is gone returns False
and is never dropped silently (ROUTER_MANDATORY). Only this user's processes may connect to a `Local` endpoint. A shut
endpoint keeps its connections.
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

from artd_schema.codec import Codec, WireError
from artd_schema.wire import worker as w

from .descriptors import EVENTS, Door, Watch
from .under_way import UnderWay

log = logging.getLogger(__name__)
In = TypeVar("In")
DRAIN = 256
LISTENERS = 8
"""The most listeners of one socket. When its file is removed more often, the oldest listener goes, and the clients that came
through it must connect again."""
BACKLOG = 64
"""Connections that wait in the kernel; ZeroMQ still accepts these after an endpoint is shut."""
HANDSHAKE_MS = 10_000
"""The router disconnects a process of this machine that connects and sends nothing for so long."""
NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: an enum's `|` costs more than sending a frame
POLLIN = int(zmq.POLLIN)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


Refuse = Callable[[bytes, list[bytes], WireError], None]


class NotAllowed(WireError):
    """The sender of a message may not send any, or no longer."""


class OverLimit(WireError):
    """All frames of a message together have more bytes than the limit."""


class Endpoint(Door, Protocol):
    """The address where a ROUTER listens, and the rule for who may connect. `address` is in ZeroMQ's form; `share` is that of
    descriptors.Watch.add."""

    address: str
    share: float

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options that guard the endpoint, then bind. Raises zmq.ZMQError."""

    def set_listener(self, descriptor: int) -> None:
        """Take the descriptor of the listening socket, which ZeroMQ owns."""

    def close(self) -> None:
        """Undo what `listen` made. Call it after the socket is closed."""


class Local:
    """A Unix socket for processes of this user: mode 0600 in a folder of mode 0700, and the kernel tells the peer's uid.

    Renaming its file shuts it: connections stay open, which they would not if ZeroMQ unbound it.
    """

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
        """Bind the socket under a new name, then rename it to its path, because libzmq may remove the file of a bound name when
        it closes that listener.

        The data folder's lock guarantees that no other daemon uses this path. An older listener stays, because unbinding it
        would end every connection that came through it.
        """
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
                self._away().unlink(missing_ok=True)  # a killed daemon may have left one

    def is_lost(self) -> bool:
        """Return whether somebody removed or replaced the file, so that no new client can connect."""
        with self._moving:
            try:
                return self._place().lstat().st_ino != self._inode
            except (FileNotFoundError, NotADirectoryError):
                return True

    def move(self, path: Path) -> None:
        """Let the next `listen` use `path`."""
        with self._moving:
            self.address, self._path = f"ipc://{path}", path

    def set_listener(self, descriptor: int) -> None:
        """Do nothing: renaming the file shuts this endpoint."""

    def shut(self) -> None:
        self._set_shut(True)

    def open(self) -> None:
        self._set_shut(False)

    def _set_shut(self, shut: bool) -> None:
        with self._moving:
            before, self._shut = self._place(), shut
            with contextlib.suppress(OSError):  # somebody removed it: `is_lost` sees that
                before.rename(self._place())

    def _place(self) -> Path:
        """Return the path of the socket's file; a shut socket has one that clients do not know."""
        return self._away() if self._shut else self._path

    def _away(self) -> Path:
        return self._path.with_name(f"{self._path.name}.shut")

    def close(self) -> None:
        with self._moving:
            self._place().unlink(missing_ok=True)


class Router(Generic[In]):
    """One bound ROUTER.

    The event loop calls `handler(peer, message, bulk)` for every message, and `refuse(peer, frames, error)` for one that cannot
    be decoded or is too large (then without its bulk); neither may block. `max_message` is in bytes, for all frames of one
    message together. The router reads nothing while `under_way` is full; `waiting` is the number of messages of one peer that
    ZeroMQ queues meanwhile. `admit(peer, key)` returns whether the key by which the peer connected is still allowed.
    """

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
        self.header = 0  # bytes of the header of the message that the handler is working on
        self._key = ""

    def bind_again(self) -> None:
        """Listen at the present address of `at`, and keep all connections. Raises OSError, zmq.ZMQError."""
        self._at.listen(self._socket)
        self.endpoint = self._at.address

    def bind(self, watch: Watch | None = None) -> None:
        """Bind the socket. `watch` shuts the endpoint when descriptors get scarce. Raises zmq.ZMQError."""
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.RCVHWM, self._waiting)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message)  # ZeroMQ limits one frame; `_receive` limits the sum
        monitor = socket.get_monitor_socket(EVENTS) if watch is not None else None
        self._at.listen(socket)
        if watch is not None and monitor is not None:
            self._at.set_listener(int(recv_monitor_message(monitor)["value"]))  # the first event is LISTENING
            watch.add(self._at, monitor, self._at.share)
        self.endpoint = self._at.address  # the kernel has chosen a port in place of 0
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
                self._news.set()  # there may be more messages
            await anyio.lowlevel.checkpoint()

    def _receive(self) -> tuple[list[bytes], int]:
        """Receive one message. Returns its frames and its size in bytes; of a message that is too large only the first three
        frames (peer, magic, header).

        recv_multipart would cost twice as much, because it asks the socket after each frame whether there is another.
        """
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
                raise NotAllowed("the key of this client was removed; `artctl key add` allows one")
            if size > self._max_message:
                del frames[3:]
                raise OverLimit(f"the message has {size} bytes, the daemon accepts at most {self._max_message}")
            message, bulk = self._codec.decode(frames[1:])
        except WireError as error:
            self.undecodable += 1
            log.warning("refused a message from %s: %s", peer.decode(errors="replace"), error)
            if self._refuse is not None:
                self._refuse(peer, frames[1:], error)
            return
        self.header = len(frames[2])
        self._handler(peer, message, bulk)

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """Put a message into the peer's queue. Returns False if the peer is gone or does not read."""
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
            # The descriptor is edge-triggered, and a send consumes the edge of messages that arrived meanwhile.
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
    """Sends messages to peers: a Router, or a test's own wire."""

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """Send a message, see `Router.send`."""


class WorkerWire:
    """Sends messages to workers by name. `register` ties a name to a peer after the daemon accepted its Hello."""

    def __init__(self, router: Peers) -> None:
        self.router = router
        self._peers: dict[str, tuple[bytes, int]] = {}

    def register(self, name: str, spawn: int, peer: bytes) -> None:
        """Tie a worker's name to a peer."""
        self._peers[name] = (peer, spawn)

    def forget(self, name: str, spawn: int) -> None:
        if self.spawn(name) == spawn:
            del self._peers[name]

    def spawn(self, name: str) -> int | None:
        """Return the spawn number of the connected process of this worker, None if none is connected."""
        known = self._peers.get(name)
        return known[1] if known else None

    def who(self, peer: bytes) -> tuple[str, int] | None:
        """Return (name, spawn) of a registered peer, None for another one."""
        return next(((name, spawn) for name, (known, spawn) in self._peers.items() if known == peer), None)

    def answer(self, peer: bytes, message: w.ToWorker) -> bool:
        """Send a message to a process that is not, or no longer, registered; see `send`."""
        return self.router.send(peer, message)

    def send(self, name: str, message: w.ToWorker, bulk: Sequence[bytes] = ()) -> bool:
        """Send a message to a worker by name. Returns False if it is not connected or does not read."""
        known = self._peers.get(name)
        return known is not None and self.router.send(known[0], message, bulk)
