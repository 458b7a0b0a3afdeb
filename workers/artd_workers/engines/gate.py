"""The gate in the engine's own process: decides which push may write its weights.

A late call of a harness that ended, or of an earlier attempt, changes nothing. The gate knows the greatest fence seen by this
engine, and whether an update is open. The fence only rises. After an update that did not finish no other begins, because the
weights are unknown. An update is written only in the way that it was opened for, so a direct pull and calls that bring tensors
never mix. It imports only the standard library, so it is tested without an engine.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

from .adapter import Fence

Way = Literal["calls", "direct"]
"""How an update writes: tensor by tensor, from disk or from a trainer, between a `begin` and a `finish` (`calls`); or
within one call that pulls or swaps (`direct`)."""


class FenceError(Exception):
    """A call of another instance or spawn, of an earlier attempt, or after a broken update."""


class Gate:
    """Admits the updates of one engine process. `instance`, `spawn`: those that this engine was started for."""

    def __init__(self, instance: str, spawn: int) -> None:
        self._instance = instance
        self._spawn = spawn
        self._seen = -1
        self._open: Way | None = None

    def admit(self, fence: Fence) -> None:
        """Raise FenceError unless this update could be opened now."""
        self._check_owner(fence)
        if fence.fence <= self._seen:
            raise FenceError(f"push {fence.push} has fence {fence.fence}, but this engine has seen fence {self._seen}")
        if self._open:
            raise FenceError(
                f"the push with fence {self._seen} did not finish: the weights are unknown, restart the engine"
            )

    def begin(self, fence: Fence, way: Way = "calls") -> None:
        """Open an update. Raises FenceError."""
        self.admit(fence)
        self._seen = fence.fence
        self._open = way

    def check(self, fence: Fence, way: Way = "calls") -> None:
        """Raise FenceError unless this is the update that is open."""
        self._check_owner(fence)
        if self._open != way or fence.fence != self._seen:
            raise FenceError(f"push {fence.push} fence {fence.fence} has no open update here")

    def require_open(self, way: Way = "calls") -> None:
        """Raise FenceError unless an update is open: for calls that cannot carry a fence (the engine's own)."""
        if self._open != way:
            raise FenceError("no update is open here")

    def finish(self, way: Way = "calls") -> None:
        """Close the open update: the weights are known again."""
        self.require_open(way)
        self._open = None

    def _check_owner(self, fence: Fence) -> None:
        if (fence.instance, fence.spawn) != (self._instance, self._spawn):
            raise FenceError(
                f"call for instance {fence.instance} spawn {fence.spawn}, but this engine belongs to instance "
                f"{self._instance} spawn {self._spawn}"
            )


@cache
def own_gate() -> Gate:
    """Return the one gate of this engine process, for the instance and spawn in its environment."""
    return Gate(os.environ.get("ARTD_INSTANCE", ""), int(os.environ["ARTD_SPAWN"]))
