"""One ZeroMQ connection to the daemon: frames out, frames in, and a call when it is gone.

Owner of: one DEALER and its monitor. Invariants: never reconnects by itself (a new Link has a new identity); a socket's
descriptor tells of *changes* only, so input is looked for after sends as well as when the loop sees the descriptor;
nothing awaits inside, so no cancellation can lose a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from .remote import Remote

GONE = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
DRAIN = 256
NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: an enum's `|` costs more than sending a frame
POLLIN = int(zmq.POLLIN)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Link:
    """`on_frames(frames)` is called in the loop for every message, `on_gone()` once, unless `close` came first. refused:
    whether it is gone because the daemon does not know this client's key."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_frames: Callable[[list[bytes]], None],
        on_gone: Callable[[], None],
        remote: Remote | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._on_gone = on_gone
        self._closed = False
        self._looking = False
        self._socket = context.socket(zmq.DEALER)
        self.refused = False
        if remote is not None:
            remote.secure(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # The requests in flight are held by their callers anyway: a limit here would only be a second, silent one.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(GONE)
        self._readers = (self._socket.FD, self._monitor.FD)
        self._loop.add_reader(self._readers[0], self._drain)
        self._loop.add_reader(self._readers[1], self._look)
        self._socket.connect(endpoint)
        self._loop.call_soon(self._look)

    @property
    def closed(self) -> bool:
        """Whether it is gone."""
        return self._closed

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message. Raises zmq.ZMQError when the socket cannot take it."""
        *first, last = frames
        for frame in first:
            self._socket.send(frame, NOBLOCK_MORE)
        self._socket.send(last, NOBLOCK)
        if not self._looking:  # once for all that is sent in this turn of the loop
            self._looking = True
            self._loop.call_soon(self._look_in)

    def _look_in(self) -> None:
        self._looking = False
        if not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
            self._drain()

    def _drain(self) -> None:
        for _ in range(DRAIN):
            if self._closed:
                return
            try:
                frame = self._socket.recv(NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = [frame.bytes]
            while frame.more:
                frame = self._socket.recv(NOBLOCK, copy=False)
                frames.append(frame.bytes)
            self._on_frames(frames)
        self._loop.call_soon(self._drain)

    def _look(self) -> None:
        if not self._closed and int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._drain()  # what came before the end
            if not self._closed:
                self.refused = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                self.close()
                self._on_gone()

    def close(self) -> None:
        """Drop the connection and whatever is unsent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for reader in self._readers:
            self._loop.remove_reader(reader)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
