"""Waits, before an engine is paused, until the daemon says that the gateway admits no further request to it.

Only a `Proceed` of the same push and fence ends the wait successfully. It ends with its deadline, and with the engine.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from artd_schema.crashpoint import reach
from artd_schema.wire.worker import FromWorker, Pausing, Proceed, Push
from artd_workers.deadline import Deadline

from .adapter import EngineError


class Hold:
    """The wait of one engine. `send` sends to the daemon."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        self._send = send
        self._answers: queue.SimpleQueue[Proceed | None] = queue.SimpleQueue()

    def wait(self, push: Push, deadline: Deadline) -> None:
        """Tell the daemon that this push is about to pause the engine, and wait for its Proceed. Raises EngineError."""
        self._send(Pausing(push=push.push, fence=push.fence))
        reach("engine.pausing")
        while (answer := self._next(push, deadline)) != Proceed(push=push.push, fence=push.fence):
            if answer is None:
                raise EngineError(f"the engine ended while push {push.push} waited for the gateway to hold")

    def proceed(self, answer: Proceed) -> None:
        """Pass on the daemon's answer. Any thread."""
        self._answers.put(answer)

    def abort(self) -> None:
        """End the wait, because the engine has ended. Any thread."""
        self._answers.put(None)

    def _next(self, push: Push, deadline: Deadline) -> Proceed | None:
        try:
            return self._answers.get(timeout=deadline.left)
        except queue.Empty:
            raise EngineError(
                f"the daemon did not say within {deadline.seconds:.1f} s that the gateway holds for push {push.push}: see its log"
            ) from None
