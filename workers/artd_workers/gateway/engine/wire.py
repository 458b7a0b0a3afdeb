"""HTTP/1.1 over an engine's Unix socket: one request a connection, whole or streamed replies.

A general client costs more than a millisecond of CPU a call. This one writes the request by hand and reads the reply with h11. No connection
is used twice: an engine that closes an idle one would look like an engine that died.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11

_READ = 1 << 16


class Broken(Exception):
    """The engine could not be reached, or its connection ended before its reply did."""


class Reply:
    """A reply whose head has been read."""

    def __init__(self, status: int, reader: asyncio.StreamReader, parser: h11.Connection, read_s: float | None) -> None:
        self.status = status
        self._reader = reader
        self._parser = parser
        self._read_s = read_s

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the body's bytes as they come. Raises Broken."""
        while isinstance(event := await _next_event(self._reader, self._parser, self._read_s), h11.Data):
            yield bytes(event.data)

    async def whole(self) -> bytes:
        """Return the body. Raises Broken."""
        return b"".join([part async for part in self.parts()])


@asynccontextmanager
async def post(socket: str, path: str, body: bytes, *, connect_s: float, read_s: float | None) -> AsyncIterator[Reply]:
    """Send a JSON body; leaving the block closes the connection, at which the engine aborts what it still does. read_s: the longest
    silence, None = any. Raises Broken."""
    try:
        async with asyncio.timeout(connect_s):
            reader, writer = await asyncio.open_unix_connection(socket, limit=_READ)
    except (OSError, TimeoutError) as error:
        raise Broken(_words(error)) from error
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await _drain(writer, read_s)
        parser = _parser()
        answer = await _next_event(reader, parser, read_s)
        while isinstance(answer, h11.InformationalResponse):
            answer = await _next_event(reader, parser, read_s)
        if not isinstance(answer, h11.Response):
            raise Broken("it closed the connection without a reply")
        yield Reply(answer.status_code, reader, parser, read_s)
    finally:
        writer.transport.abort()


def _parser() -> h11.Connection:
    """Return a client whose request is out: h11 is told of one, and what it would send is dropped."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=_HEADERS))
    parser.send(h11.EndOfMessage())
    return parser


_HEADERS = h11.Request(method="POST", target="/", headers=[("host", "engine"), ("connection", "close")]).headers


async def _drain(writer: asyncio.StreamWriter, limit_s: float | None) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await writer.drain()
    except (OSError, TimeoutError) as error:
        raise Broken(_words(error)) from error


async def _next_event(reader: asyncio.StreamReader, parser: h11.Connection, limit_s: float | None) -> Any:
    try:
        while (event := parser.next_event()) is h11.NEED_DATA:
            if limit_s is None:
                data = await reader.read(_READ)
            else:
                async with asyncio.timeout(limit_s):
                    data = await reader.read(_READ)
            parser.receive_data(data)
    except h11.RemoteProtocolError as error:
        raise Broken(str(error)) from error
    except (OSError, TimeoutError) as error:
        raise Broken(_words(error)) from error
    return event


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
