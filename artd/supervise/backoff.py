"""Decides when a worker that died starts again, and when it does not.

Owns the recent deaths of one worker. Pure (clock and random numbers come from the caller). The caller reports only
deaths that nobody ordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Policy:
    """The delays of restarts, in seconds.

    The first restart comes at once, the next ones after base_s * 2**n, ± jitter, at most cap_s. A worker that runs for stable_s
    starts from the first again. `deaths` deaths within window_s break the worker.
    """

    base_s: float = 1.0
    cap_s: float = 60.0
    jitter: float = 0.2
    stable_s: float = 120.0
    deaths: int = 5
    window_s: float = 600.0


@dataclass
class Backoff:
    """The back-off of one worker. `random` returns numbers that are uniform in [0, 1)."""

    policy: Policy
    random: Callable[[], float]
    _in_a_row: int = 0
    _deaths: deque[float] = field(default_factory=deque)

    def record_death(self, started: float, now: float) -> float | None:
        """Record the death of a worker that ran from `started` to `now`. Returns the seconds until its next start, None if it is
        broken."""
        policy = self.policy
        if now - started >= policy.stable_s:
            self._in_a_row = 0
        self._deaths.append(now)
        while now - self._deaths[0] > policy.window_s:
            self._deaths.popleft()
        if len(self._deaths) >= policy.deaths:
            return None
        self._in_a_row += 1
        if self._in_a_row == 1:
            return 0.0
        spread = 1 + policy.jitter * (2 * self.random() - 1)
        return min(policy.cap_s, policy.base_s * 2.0 ** min(self._in_a_row - 2, 64) * spread)

    def reset(self) -> None:
        """Forget all deaths, because the operator wants a fresh start."""
        self._in_a_row = 0
        self._deaths.clear()
