"""JSON over HTTP over a Unix socket, one connection a call.

Purpose: the harness's only way to its server; blocking, with a deadline on every call.
Owner of: no state (a connection lives for one call). Errors: EngineTimeout, EngineError (refused, reset, or a status
that is not 2xx, with the server's own message).
"""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

from .base import Deadline, EngineError, EngineTimeout

_MESSAGE_LIMIT = 2000


class StatusError(EngineError):
    """The server answered with a status that is not 2xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def call(path: str, method: str, route: str, body: Any = None, *, deadline: Deadline) -> Any:
    """One request to the server on the Unix socket `path`; returns decoded JSON, the text if it is none, or None."""
    connection = _UnixConnection(path, deadline.left)
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    try:
        connection.request(method, route, data, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except TimeoutError:
        raise EngineTimeout(f"{method} {route}: no answer within {deadline.seconds:.1f} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{method} {route}: the server does not answer ({type(error).__name__}: {error})") from None
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        raise StatusError(response.status, f"{method} {route}: status {response.status}: {_message(text)}")
    return _decode(text)


def _decode(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(text: str) -> str:
    """The server's error message, out of the envelopes that vLLM and FastAPI put round it."""
    value = _decode(text)
    if isinstance(value, dict):
        value = value.get("error", value.get("detail", value))
    if isinstance(value, dict):
        value = value.get("message", value)
    return str(value)[:_MESSAGE_LIMIT]
