"""A reply of server-sent events: begun with its first event, ended when its client goes, errors after its beginning told in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from artd_workers.gateway.errors import ApiError

from .body import while_connected

log = logging.getLogger("artd.gateway")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Channel:
    """Where the events of one reply are written. begun: whether its head has been sent."""

    def __init__(self, send: Send, read_s: float) -> None:
        self.begun = False
        self._send = send
        self._read_s = read_s

    async def write(self, data: bytes) -> None:
        """Send whole events. It waits while the client has much to read yet. Raises ClientDisconnect when that takes `Limits.read_s`: who
        does not read holds a place in the engine that others wait for."""
        try:
            async with asyncio.timeout(self._read_s):
                await self._write(data)
        except TimeoutError:
            raise ClientDisconnect from None

    async def _write(self, data: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Send the end of the reply."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class Streamed(Response):
    """Runs `work` with a channel. An error before the first event is an error reply; one after it is the last event."""

    def __init__(
        self,
        request: Request,
        work: Callable[[Channel], Coroutine[Any, Any, None]],
        error_event: Callable[[ApiError], bytes],
        read_s: float,
    ) -> None:
        super().__init__()
        self._error_event = error_event
        self._read_s = read_s
        self._request = request
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        channel = Channel(send, self._read_s)
        try:
            await while_connected(self._request, self._work(channel))
        except ClientDisconnect:
            return
        except ApiError as error:
            if not channel.begun:
                raise
            await channel.write(self._error_event(error))
        except Exception as error:
            if not channel.begun:
                raise
            log.exception("a stream failed")
            what = f"the gateway failed: {type(error).__name__}: {error}; its log: artctl logs gateway"
            await channel.write(self._error_event(ApiError(500, "internal", what)))
        await channel.end()


def event(data: bytes, name: str = "") -> bytes:
    """Return one server-sent event."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


def encode_event(value: object, name: str = "") -> bytes:
    """Return one server-sent event with a value as JSON."""
    return event(msgspec.json.encode(value), name)
