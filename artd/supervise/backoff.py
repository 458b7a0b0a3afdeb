"""When a worker that died is started again, and when it is not.

Owner of: the recent deaths of one worker. Invariants: pure (clock and random numbers come from the caller); only deaths
that nobody ordered are told to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Policy:
    """First respawn at once, then base_s * 2**n, ± jitter, at most cap_s; forgotten after stable_s up.

    `deaths` deaths within window_s break the worker. All times in seconds.
    """

    base_s: float = 1.0
    cap_s: float = 60.0
    jitter: float = 0.2
    stable_s: float = 120.0
    deaths: int = 5
    window_s: float = 600.0


@dataclass
class Backoff:
    """random: uniform in [0, 1)."""

    policy: Policy
    random: Callable[[], float]
    _in_a_row: int = 0
    _deaths: deque[float] = field(default_factory=deque)

    def died(self, started: float, now: float) -> float | None:
        """Seconds until the next start of a worker that ran from `started` to `now`; None = it is broken."""
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
        """The operator wants a fresh start."""
        self._in_a_row = 0
        self._deaths.clear()
