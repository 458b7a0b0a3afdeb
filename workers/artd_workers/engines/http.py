"""Sends JSON over HTTP over a Unix socket, one connection per call: the harness's only way to its server.

Calls block, each with a deadline. They raise EngineTimeout, and EngineError when the connection is refused or reset, or for a
status that is not 2xx, with the server's own message.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from artd_workers.deadline import Deadline

from .adapter import EngineError, EngineTimeout

_MESSAGE_LIMIT = 2000
_AGAIN_S = 0.02
_LOOK_S = 1.0


class StatusError(EngineError):
    """The server answered with a status that is not 2xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Socket(socket.socket):
    """A socket with a deadline for the whole answer, which may move. Python's timeout is per read, so a slow answer would never
    end."""

    deadline: Deadline

    def recv_into(self, *args: Any) -> int:
        while not self.deadline.passed:
            self.settimeout(min(self.deadline.left, _LOOK_S))
            with contextlib.suppress(TimeoutError):
                return super().recv_into(*args)
        raise TimeoutError


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, deadline: Deadline) -> None:
        super().__init__("localhost")
        self._path = path
        self._deadline = deadline

    def connect(self) -> None:
        self.sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.deadline = self._deadline
        while not self._deadline.passed:
            self.sock.settimeout(self._deadline.left)
            try:
                return self.sock.connect(self._path)
            except BlockingIOError:  # the server's queue of connections is full
                time.sleep(_AGAIN_S)
        raise TimeoutError


def call(
    path: str,
    method: str,
    route: str,
    body: Any = None,
    *,
    deadline: Deadline,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send one request to the server on the Unix socket `path`. Returns decoded JSON, the text if it is not JSON, or None."""
    connection = _UnixConnection(path, deadline)
    data = None if body is None else json.dumps(body).encode()
    more = dict(headers or {}) | ({} if data is None else {"Content-Type": "application/json"})
    try:
        connection.request(method, route, data, more)
        with connection.getresponse() as response:
            text = response.read().decode(errors="replace")
    except TimeoutError:
        raise EngineTimeout(f"{method} {route}: no answer within {deadline.seconds:.1f} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{method} {route}: the server does not answer ({type(error).__name__}: {error})") from None
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        said = f": {_message(text)}" if text else ""
        raise StatusError(response.status, f"{method} {route}: status {response.status}{said}")
    return _decode(text)


def _decode(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(text: str) -> str:
    """Return the server's error message without the envelopes of the engine and FastAPI."""
    value = _decode(text)
    if isinstance(value, dict):
        value = value.get("error", value.get("detail", value))
    if isinstance(value, dict):
        value = value.get("message", value)
    return str(value)[:_MESSAGE_LIMIT]
