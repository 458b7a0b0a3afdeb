"""The client's exceptions. All are `ArtdError`s and say what was wrong, where, and what to do next.

Every code of `artd_schema.wire.client_api.CODES` has exactly one class.
"""

from __future__ import annotations

from collections.abc import Mapping

from artd_schema.wire import client_api as api


class ArtdError(Exception):
    """The base of all errors.

    `message` is for people. `field` is the path of the bad field, "" when there is none. `key` is the key of the submission
    that failed, "" for other calls: `submit` with this key counts once, whether or not the first call was stored.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.key = ""


class Invalid(ArtdError):
    """The request breaks a rule; `field` says where. Repeating it cannot help."""


class NotFound(ArtdError):
    """There is no such run, group, job or response."""


class Conflict(ArtdError):
    """The request contradicts what is stored: other content under the same key, another spec, a closed group. Repeating it
    cannot help."""


class Busy(ArtdError):
    """The daemon could not accept this within the call's time-out, for example because its disk is full. `retry_after`:
    seconds."""

    def __init__(self, message: str, field: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message, field)
        self.retry_after = retry_after


class TooLarge(ArtdError):
    """The message is above the daemon's limit and was not sent. `size`, `limit`: bytes of all frames, 0 when the daemon refused
    it."""

    def __init__(self, message: str, field: str = "", size: int = 0, limit: int = 0) -> None:
        super().__init__(message, field)
        self.size = size
        self.limit = limit


class Draining(ArtdError):
    """The daemon is stopping, and no other daemon started within the call's time-out. Nothing was done."""


class Failed(ArtdError):
    """The daemon failed while it served this request, or the awaited step will not come."""


class Stalled(ArtdError):
    """No group is open and fewer than `needed` sealed groups are trainable: submit more groups, or flush.

    `step`: the newest committed step. `sealed`, `trainable`: numbers of waiting groups. `discarded`: reason -> number, of the
    newest discarded groups.
    """

    def __init__(
        self, step: int, sealed: int, trainable: int, needed: int, discarded: Mapping[str, int] | None = None
    ) -> None:
        why = ", ".join(f"{count} × {reason}" for reason, count in (discarded or {}).items())
        super().__init__(
            f"step {step + 1} has {trainable} of {needed} trainable groups ({sealed} sealed) and no group is open: "
            "submit more groups, or `await run.flush()` to train on fewer"
            + (f". The newest discarded groups: {why}" if why else "")
        )
        self.discarded = dict(discarded or {})
        self.step = step
        self.sealed = sealed
        self.trainable = trainable
        self.needed = needed


class DaemonNotRunning(ArtdError):
    """No daemon answers on the data folder. `command` starts one. An earlier daemon may have carried out the request."""

    def __init__(self, message: str, command: str) -> None:
        super().__init__(message)
        self.command = command


class TimedOut(ArtdError, TimeoutError):
    """The daemon did not answer in time. The request may have been carried out, or still be.

    `submit` may be repeated with `key=error.key`: then it counts once.
    """


class NotAllowed(ArtdError):
    """A daemon on another machine does not know this client's key, or has removed it."""


class WrongProtocol(ArtdError):
    """Client and daemon speak different protocols."""


class Closed(ArtdError):
    """The client is closed, or not open yet. Calls that were under way may or may not have been carried out."""


def from_answer(error: api.Error) -> ArtdError:
    """Return the exception for the daemon's Error; an unknown code becomes `Failed`."""
    match error.code:
        case "invalid":
            return Invalid(error.message, error.field)
        case "not_found":
            return NotFound(error.message, error.field)
        case "conflict":
            return Conflict(error.message, error.field)
        case "busy":
            return Busy(error.message, error.field, error.retry_after_s)
        case "too_large":
            return TooLarge(error.message, error.field)
        case "not_allowed":
            return NotAllowed(error.message, error.field)
        case "draining":
            return Draining(error.message, error.field)
        case _:
            return Failed(error.message, error.field)
