"""One request to the daemon and its answer, for commands that live for one request.

Owner of: one DEALER socket, closed before `ask` returns. Invariants: nothing is resent, so nothing is done twice: an
answer that does not come is told as such.
"""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from artd_schema import PROTOCOL
from artd_schema import client_api as api
from artd_schema.codec import Codec, WireError
from artd_schema.paths import read_daemon_file


class Refused(Exception):
    """The daemon's typed error; code: one of client_api.CODES."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NoAnswer(Exception):
    """The daemon did not answer in time; whether it did what was asked is not known."""


def ask(data: Path, op: api.Op, timeout_s: float) -> api.Answer:
    """Send Hello, then `op`; returns its answer. Raises Refused, NoAnswer."""
    end = time.monotonic() + timeout_s
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(_endpoint(data, end))
        for number, each in enumerate((api.Hello(protocol=PROTOCOL, client="artctl"), op), 1):
            answer = _exchange(socket, api.Request(id=number, op=each), end)
            if isinstance(answer, api.Error):
                raise Refused(answer.code, answer.message)
        return answer
    finally:
        socket.close()
        context.term()


def _endpoint(data: Path, end: float) -> str:
    """The daemon's client socket; a daemon that is still starting has none yet. Raises NoAnswer."""
    while True:
        told = read_daemon_file(data)
        if told is not None and told.socket and told.alive():
            return told.socket
        if time.monotonic() > end:
            raise NoAnswer(f"the daemon on {data} has not opened its socket yet")
        time.sleep(0.02)


def _exchange(socket: zmq.Socket[bytes], request: api.Request, end: float) -> api.Answer:
    codec: Codec[api.Reply] = Codec(api.Reply)
    socket.send_multipart(codec.encode(request))
    while (left := end - time.monotonic()) > 0:
        if not socket.poll(int(left * 1000) + 1):
            break
        try:
            reply, _ = codec.decode(socket.recv_multipart())
        except WireError as error:
            raise Refused("failed", f"the daemon's answer cannot be read ({error}): artctl and artd differ") from None
        if reply.id == request.id:
            return reply.answer
    raise NoAnswer("the daemon did not answer in time; it may still do what was asked")
