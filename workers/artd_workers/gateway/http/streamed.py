"""Replies that know whether their client had them whole: of one piece, and of server-sent events."""

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
Ended = Callable[[bool], None]
_PIECE = 1 << 16
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


class Whole(Response):
    """A JSON reply of one piece. ended: told whether its last byte left while the client was there."""

    def __init__(self, request: Request, content: bytes, ended: Ended) -> None:
        super().__init__(content, media_type="application/json")
        self._request = request
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            content = bytes(self.body)
            last = max(len(content) - 1, 0) // _PIECE * _PIECE
            for at in range(
                0, last, _PIECE
            ):  # the server takes the next piece when the client has read most of the last
                await send({"type": "http.response.body", "body": content[at : at + _PIECE], "more_body": True})
            there = not await self._request.is_disconnected()
            await send({"type": "http.response.body", "body": content[last:]})
            whole = there
        finally:
            self._ended(whole)


class Streamed(Response):
    """Runs `work` with a channel. An error before the first event is an error reply; one after it is the last event. ended: as of
    `Whole`."""

    def __init__(
        self,
        request: Request,
        work: Callable[[Channel], Coroutine[Any, Any, None]],
        error_event: Callable[[ApiError], bytes],
        read_s: float,
        ended: Ended,
    ) -> None:
        super().__init__()
        self._ended = ended
        self._error_event = error_event
        self._read_s = read_s
        self._request = request
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = False
        try:
            whole = await self._serve(Channel(send, self._read_s))
        finally:
            self._ended(whole)

    async def _serve(self, channel: Channel) -> bool:
        """Return whether the client had everything."""
        whole = False
        try:
            await while_connected(self._request, self._work(channel))
            whole = not await self._request.is_disconnected()
        except ClientDisconnect:
            return False
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
        return whole


def event(data: bytes, name: str = "") -> bytes:
    """Return one server-sent event."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


def encode_event(value: object, name: str = "") -> bytes:
    """Return one server-sent event with a value as JSON."""
    return event(msgspec.json.encode(value), name)
