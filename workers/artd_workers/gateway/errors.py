"""Defines the gateway's errors and their JSON form, which OpenAI clients parse.

Every reply that is not 2xx carries `{"error": {"message", "type", "code", "param"}}`.
"""

from __future__ import annotations

import math

import msgspec

_TYPES = {401: "authentication_error", 404: "not_found_error", 502: "engine_error", 503: "unavailable_error"}


class ApiError(Exception):
    """A request ends with this status. `code` is the machine's word for it, `retry_after_s` becomes Retry-After."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """The `type` field, which follows from the status."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "code": self.code, "param": self.param}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class EngineFailure(Exception):
    """An engine gave no usable answer. retriable: no token of this request has come out of it."""

    def __init__(self, engine: str, message: str, *, retriable: bool = True) -> None:
        super().__init__(f"engine {engine}: {message}")
        self.engine = engine
        self.retriable = retriable


def invalid(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    return ApiError(400, code, message, param=param)


def abort_error(what: str, retry_after_s: float) -> ApiError:
    """Return the error of a request that a push ended after its first token: the client must send it again."""
    return ApiError(503, "aborted", f"{what}; send it again", retry_after_s=retry_after_s)
