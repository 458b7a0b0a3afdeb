"""Stored deadlines under a wall clock that jumps: how much time is left, whatever the clock did.

Owner of: nothing; pure. Times are milliseconds. Invariants: what is left is never more than the longest time that the
deadline can have been given, and a jump neither ends a wait early nor prolongs it.
"""

from __future__ import annotations

JUMP_MS = 5_000
"""A wall clock that moved this much more or less than the monotonic one was set, or the machine slept."""
DRIFT_MS = 250
"""Stored deadlines follow a wall clock that has drifted this far from the monotonic one, however slowly."""
LARGE_MS = 3_600_000
"""Nothing is deleted by its age after a jump of more than this until somebody has looked."""
DOWN_MS = 7 * 86_400_000
"""A daemon that was down for longer cannot tell its absence from a jump."""
SLACK_MS = 60_000
"""A running daemon never leaves a deadline unmet for so long."""


def time_left(due: int, before: int, now: int, longest: int, otherwise: int) -> int:
    """Of a deadline `due`, what is left now.

    before: what the clock would say now without its jump, or what it said when the daemon was last seen. A deadline that makes
    no sense by that time was stored after the jump, so it is read by `now`; one that makes no sense by either has
    `otherwise` left.
    """
    for clock in (before, now):
        if -SLACK_MS <= due - clock <= longest:
            return max(0, due - clock)
    return otherwise


def distrust(seen: int, now: int) -> str:
    """Why ages cannot be trusted at a boot whose newest row is from `seen`; "" when they can."""
    gap = now - seen
    if gap < -LARGE_MS:
        return f"the clock is {days(-gap)} behind the newest row"
    return f"the clock is {days(gap)} ahead of the newest row" if gap > DOWN_MS else ""


def days(ms: int) -> str:
    return f"{ms / 86_400_000:.1f} days" if ms >= 2 * 86_400_000 else f"{ms / 3_600_000:.1f} hours"
