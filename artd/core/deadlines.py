"""Computes how much time is left until a stored deadline, even if the wall clock jumps.

Pure functions; times are milliseconds. The time left never exceeds the longest wait that the deadline can have been
given. A jump of the clock neither ends a wait early nor prolongs it.
"""

from __future__ import annotations

JUMP_MS = 5_000
"""The wall clock jumped (it was set, or the machine slept) if it moved this much more or less than the monotonic clock."""
DRIFT_MS = 250
"""Stored deadlines are corrected once the wall clock has drifted this far from the monotonic clock, however slowly."""
LARGE_MS = 3_600_000
"""After a jump of more than this nothing is deleted by its age until an operator has looked."""
DOWN_MS = 7 * 86_400_000
"""A daemon that was down for longer than this cannot tell its absence from a jump of the clock."""
SLACK_MS = 60_000
"""A running daemon handles every deadline within this time after it has passed."""


def time_left(due: int, before: int, now: int, longest: int, otherwise: int) -> int:
    """Return the time left until the deadline `due`.

    `before` is the time without the jump: what the clock would show now, or what it showed when the daemon was last
    seen. A deadline that is implausible by `before` was stored after the jump, so it is compared with `now`. If it is
    implausible by both, `otherwise` is left.
    """
    for clock in (before, now):
        if -SLACK_MS <= due - clock <= longest:
            return max(0, due - clock)
    return otherwise


def distrust(seen: int, now: int) -> str:
    """Return why ages cannot be trusted at a boot whose newest row is from `seen`, or "" if they can."""
    gap = now - seen
    if gap < -LARGE_MS:
        return f"the clock is {days(-gap)} behind the newest row"
    return f"the clock is {days(gap)} ahead of the newest row" if gap > DOWN_MS else ""


def days(ms: int) -> str:
    return f"{ms / 86_400_000:.1f} days" if ms >= 2 * 86_400_000 else f"{ms / 3_600_000:.1f} hours"
