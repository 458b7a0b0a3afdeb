"""What can go wrong, each with a type of its own. All are `ArtdError`s and say what was wrong, where, and what to do next.

Owner of: no state. Invariants: every code of `artd_schema.client_api.CODES` has exactly one class.
"""

from __future__ import annotations

from collections.abc import Mapping

from artd_schema import client_api as api


class ArtdError(Exception):
    """message: for people; field: path of a bad field, "" when none is to blame; key: of the submit that failed, "" of any
    other call. `submit` again with this key counts once, whether or not the first call was stored."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.key = ""


class Invalid(ArtdError):
    """The request breaks a rule; `field` says where. Sending it again cannot help."""


class NotFound(ArtdError):
    """There is no such run, group, job or response."""


class Conflict(ArtdError):
    """The request contradicts what is stored: other content under the same key, another spec, a closed group. Sending it
    again cannot help."""


class Busy(ArtdError):
    """The daemon cannot take this now (its disk is full), and could not within the call's time-out. retry_after: seconds."""

    def __init__(self, message: str, field: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message, field)
        self.retry_after = retry_after


class TooLarge(ArtdError):
    """A message over the daemon's limit; it was not sent. size, limit: bytes of all frames (0 when the daemon refused)."""

    def __init__(self, message: str, field: str = "", size: int = 0, limit: int = 0) -> None:
        super().__init__(message, field)
        self.size = size
        self.limit = limit


class Draining(ArtdError):
    """The daemon is stopping, and no other took its place within the call's time-out. Nothing was done."""


class Failed(ArtdError):
    """The daemon failed at this request, or what was waited for will not come."""


class Stalled(ArtdError):
    """No rollout is open and fewer than `needed` sealed groups are trainable: submit more groups, or flush.

    step: newest committed; sealed, trainable: groups waiting; discarded: of the newest discarded groups, how many for which
    reason.
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
    """No daemon answers on the data folder. command: what starts one. A request that one before it got may have been
    done."""

    def __init__(self, message: str, command: str) -> None:
        super().__init__(message)
        self.command = command


class TimedOut(ArtdError, TimeoutError):
    """The daemon is connected but did not answer in time: the request may or may not have been done, or may still be. A
    submit may be repeated with `key=error.key`: then it counts once."""


class NotAllowed(ArtdError):
    """A daemon on another machine does not know this client's key, or no longer."""


class WrongProtocol(ArtdError):
    """Client and daemon speak different protocols."""


class Closed(ArtdError):
    """The client was closed, or not opened yet. What was under way may or may not have been done."""


def from_answer(error: api.Error) -> ArtdError:
    """The exception for an Error of the daemon; an unknown code is `Failed`."""
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
