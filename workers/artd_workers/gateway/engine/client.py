"""HTTP calls to engines over their Unix sockets.

Owner of: one httpx client per socket. Invariants: no connection is used twice (an engine that closes an idle one would
look like an engine that died); a socket that no route names is closed once its last call has ended; an engine's 5xx, a
broken connection and an unreadable reply are `EngineFailure`, its 4xx an `ApiError` for the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from artd_schema.codec import UNREADABLE
from artd_workers.gateway.dialect import Dialect, dialect_of
from artd_workers.gateway.errors import ApiError, EngineFailure
from artd_workers.gateway.limits import Limits

Read = Callable[[bytes], Any]
IN_THREAD = 1 << 20
"""Bytes of JSON above which they are read and written away from the event loop: some milliseconds' work."""


class EngineClient:
    """Calls to the OpenAI server behind one socket, and the dialect that it speaks."""

    def __init__(self, name: str, socket: str, limits: Limits, dialect: Dialect) -> None:
        self.name = name
        self.dialect = dialect
        self.active = 0
        self.retired = False
        self._call_s = limits.call_s
        self._connect_s = limits.connect_s
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=socket, verify=False, trust_env=False, limits=pool)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://engine", trust_env=False)

    async def post(
        self, path: str, body: dict[str, Any], *, unbounded: bool = False, read: Read = msgspec.json.decode
    ) -> Any:
        """POST JSON, return what `read` makes of the reply's bytes, in a thread if they are many; its msgspec errors are
        the engine's failures. unbounded: no read deadline. Errors: EngineFailure, ApiError 400."""
        self.active += 1
        try:
            response = await self._send(path, body, unbounded)
            if len(response.content) <= IN_THREAD:
                return self._decode(path, response, read)
            return await asyncio.to_thread(self._decode, path, response, read)
        finally:
            self.active -= 1
            if self.retired:
                await self.close_if_idle()

    async def close_if_idle(self) -> None:
        if self.active == 0:
            await self._client.aclose()

    async def _send(self, path: str, body: dict[str, Any], unbounded: bool) -> httpx.Response:
        read = None if unbounded else self._call_s
        timeout = httpx.Timeout(self._call_s, connect=self._connect_s, read=read, pool=None)
        headers = {"content-type": "application/json"}
        try:
            return await self._client.post(path, content=msgspec.json.encode(body), headers=headers, timeout=timeout)
        except httpx.TransportError as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise EngineFailure(self.name, f"{path} broke off ({what})") from error

    def _decode(self, path: str, response: httpx.Response, read: Read) -> Any:
        if response.status_code != 200:
            raise self._error(path, response)
        try:
            return read(response.content)
        except msgspec.ValidationError as error:
            raise EngineFailure(self.name, f"{path} answered 200 with JSON of another form: {error}") from error
        except UNREADABLE as error:
            raise EngineFailure(self.name, f"{path} answered 200 with what is no JSON: {error}") from error

    def _error(self, path: str, response: httpx.Response) -> ApiError | EngineFailure:
        status = response.status_code
        message, param = _message(response)
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

    async def keep(self, sockets: set[str]) -> None:
        """Forget every client whose socket is not among these."""
        for socket in self._clients.keys() - sockets:
            client = self._clients.pop(socket)
            client.retired = True
            await client.close_if_idle()


def _message(response: httpx.Response) -> tuple[str, str | None]:
    try:
        error = msgspec.json.decode(response.content)["error"]
        return str(error["message"]), error.get("param")
    except (*UNREADABLE, KeyError, TypeError, AttributeError):
        return response.text[:500] or "(empty reply)", None
