"""The gate in the engine's own process: which push may write its weights.

Purpose: a late call of an ended harness, or of an earlier attempt, changes nothing.
Owner of: the greatest fence seen by this engine, and whether an update is open or broken.
Invariants: the fence only rises; after an update that did not finish no other begins (the weights are unknown).
Imports nothing but the standard library: it is tested without an engine.
"""

from __future__ import annotations

from .base import Fence


class FenceError(Exception):
    """A call came from another instance or spawn, from an earlier attempt, or after a broken update."""


class Gate:
    """instance, spawn: those that this engine was started for."""

    def __init__(self, instance: str, spawn: int) -> None:
        self._instance = instance
        self._spawn = spawn
        self._seen = -1
        self._open = False

    def begin(self, fence: Fence) -> None:
        """Open an update. Raises FenceError."""
        self._check_owner(fence)
        if fence.fence <= self._seen:
            raise FenceError(f"push {fence.push} has fence {fence.fence}, but this engine has seen fence {self._seen}")
        if self._open:
            raise FenceError(
                f"the push with fence {self._seen} did not finish: the weights are unknown, restart the engine"
            )
        self._seen = fence.fence
        self._open = True

    def check(self, fence: Fence) -> None:
        """Raise FenceError unless this is the update that is open."""
        self._check_owner(fence)
        if not self._open or fence.fence != self._seen:
            raise FenceError(f"push {fence.push} fence {fence.fence} has no open update here")

    def require_open(self) -> None:
        """Raise FenceError unless an update is open: for calls that cannot carry a fence (vLLM's own)."""
        if not self._open:
            raise FenceError("no update is open here")

    def finish(self) -> None:
        """The open update is complete: the weights are known again."""
        self.require_open()
        self._open = False

    def _check_owner(self, fence: Fence) -> None:
        if (fence.instance, fence.spawn) != (self._instance, self._spawn):
            raise FenceError(
                f"call for instance {fence.instance} spawn {fence.spawn}, but this engine belongs to instance "
                f"{self._instance} spawn {self._spawn}"
            )
