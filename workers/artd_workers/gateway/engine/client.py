"""HTTP calls to engines over their Unix sockets.

An engine's 5xx, a broken connection and an unreadable reply are `EngineFailure`, its 4xx an `ApiError` for the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from artd_schema.codec import UNREADABLE
from artd_workers.gateway.dialect import Dialect, dialect_of
from artd_workers.gateway.errors import ApiError, EngineFailure
from artd_workers.gateway.limits import Limits

from . import wire

Read = Callable[[bytes], Any]
IN_THREAD = 1 << 20
"""Bytes of JSON above which they are read and written away from the event loop: some milliseconds' work."""


class EngineClient:
    """Calls to the OpenAI server behind one socket, and the dialect that it speaks."""

    def __init__(self, name: str, socket: str, limits: Limits, dialect: Dialect) -> None:
        self.name = name
        self.dialect = dialect
        self._socket = socket
        self._call_s = limits.call_s
        self._connect_s = limits.connect_s

    async def post(
        self, path: str, body: dict[str, Any], *, unbounded: bool = False, read: Read = msgspec.json.decode
    ) -> Any:
        """POST JSON, return what `read` makes of the reply's bytes, in a thread if they are many; its msgspec errors are
        the engine's failures. unbounded: no read deadline. Raises EngineFailure, ApiError 400."""
        status, content = await self._send(path, body, unbounded)
        if len(content) <= IN_THREAD:
            return self._decode(path, status, content, read)
        return await asyncio.to_thread(self._decode, path, status, content, read)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """POST JSON and yield the data of each server-sent event, without `[DONE]`. No read deadline; closing the iterator ends the
        request. Raises EngineFailure, ApiError 400."""
        try:
            async with wire.post(
                self._socket, path, msgspec.json.encode(body), connect_s=self._connect_s, read_s=None
            ) as reply:
                if reply.status != 200:
                    raise self._error(path, reply.status, await reply.whole())
                async with aclosing(_data_of(reply.parts())) as found:
                    async for data in found:
                        yield data
        except wire.Broken as error:
            raise EngineFailure(self.name, f"{path} broke off ({error})") from error

    async def _send(self, path: str, body: dict[str, Any], unbounded: bool) -> tuple[int, bytes]:
        read_s = None if unbounded else self._call_s
        content = msgspec.json.encode(body)
        try:
            async with wire.post(self._socket, path, content, connect_s=self._connect_s, read_s=read_s) as reply:
                return reply.status, await reply.whole()
        except wire.Broken as error:
            raise EngineFailure(self.name, f"{path} broke off ({error})") from error

    def _decode(self, path: str, status: int, content: bytes, read: Read) -> Any:
        if status != 200:
            raise self._error(path, status, content)
        try:
            return read(content)
        except msgspec.ValidationError as error:
            raise EngineFailure(self.name, f"{path} answered 200 with JSON of another form: {error}") from error
        except UNREADABLE as error:
            raise EngineFailure(self.name, f"{path} answered 200 with what is no JSON: {error}") from error

    def _error(self, path: str, status: int, content: bytes) -> ApiError | EngineFailure:
        message, param = _message(content)
        return self.error(path, status, message, param)

    def error(self, path: str, status: int, message: str, param: str | None = None) -> ApiError | EngineFailure:
        """Return what an engine's error is to the gateway: the client's, by 4xx, or the engine's failure."""
        if status >= 500 or status in (401, 403, 404):
            hint = self.dialect.hints.get(status, "")
            return EngineFailure(self.name, f"{path} answered {status}: {message}{hint}")
        for telling, lead in self.dialect.overflow.items():
            if telling in message:
                return ApiError(400, "context_length_exceeded", lead + message, param=param)
        return ApiError(400, "invalid_request", message, param=param)


class Engines:
    """The clients of every engine in the routing table."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clients: dict[str, EngineClient] = {}

    def client(self, name: str, socket: str, kind: str) -> EngineClient:
        """Return the client of this socket, for an engine of this kind."""
        if socket not in self._clients:
            self._clients[socket] = EngineClient(name, socket, self._limits, dialect_of(kind))
        return self._clients[socket]

    def keep(self, sockets: set[str]) -> None:
        """Forget every client whose socket is not among these; calls under way go on."""
        for socket in self._clients.keys() - sockets:
            del self._clients[socket]


async def _data_of(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the data of server-sent events up to `[DONE]`. Raises Broken when the stream ends before."""
    held: list[bytes] = []  # of a line that goes on: one with routed experts has megabytes
    async for part in parts:
        first, *lines = part.split(b"\n")
        held.append(first)
        for line in lines:
            whole, held = b"".join(held), [line]
            if whole.startswith(b"data:"):
                data = whole[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    raise wire.Broken("its stream ended without [DONE]")


def _message(content: bytes) -> tuple[str, str | None]:
    try:
        error = msgspec.json.decode(content)["error"]
        return str(error["message"]), error.get("param")
    except (*UNREADABLE, KeyError, TypeError, AttributeError):
        return content[:500].decode(errors="replace") or "(empty reply)", None
