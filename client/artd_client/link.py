"""One ZeroMQ connection to the daemon: sends and receives frames, and reports its end.

It never reconnects; a new Link has a new identity. A ZeroMQ descriptor signals *changes* only, so input is read after sends
too, not only when the loop sees the descriptor. Nothing here awaits, so no cancellation can lose a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from .address import Remote

GONE = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
DRAIN = 256
NOBLOCK = int(zmq.NOBLOCK)  # plain numbers, because `|` on an enum costs more than sending a frame
POLLIN = int(zmq.POLLIN)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Link:
    """A DEALER socket with its monitor.

    `on_frames(frames)` is called in the loop for every message, and `on_gone()` once when the connection ends, unless `close`
    came first. `refused`: whether it ended because the daemon does not know this client's key.
    """

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
        # Callers already limit the requests in flight; a limit of the socket would drop messages silently.
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
        """Whether the connection has ended."""
        return self._closed

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message. Raises zmq.ZMQError when the socket cannot take it."""
        *first, last = frames
        for frame in first:
            self._socket.send(frame, NOBLOCK_MORE)
        self._socket.send(last, NOBLOCK)
        if not self._looking:  # once for everything that is sent in this cycle of the loop
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
            self._drain()  # messages that arrived before the end
            if not self._closed:
                self.refused = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                self.close()
                self._on_gone()

    def close(self) -> None:
        """Drop the connection and all unsent messages. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        for reader in self._readers:
            self._loop.remove_reader(reader)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
