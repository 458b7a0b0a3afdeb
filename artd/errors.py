"""Errors that reach a client, each with the code that `artd_schema.wire.client_api.CODES` names."""

from __future__ import annotations


class RequestError(Exception):
    """The daemon cannot serve a request. `message` says what was wrong, where, and what to do next; `field` is the path of a
    bad field; `retry_after_s` is in seconds, 0 means no advice."""

    code = "failed"

    def __init__(self, message: str, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class Invalid(RequestError):
    code = "invalid"


class Unreadable(RequestError):
    """A stored row has a form that this artd cannot read."""


class NotFound(RequestError):
    code = "not_found"


class Conflict(RequestError):
    code = "conflict"


class Busy(RequestError):
    code = "busy"


class Draining(RequestError):
    code = "draining"
