"""Corrects stored deadlines when the wall clock jumps, and stops deletion by age until an operator has looked.

A group, a delayed job and a delayed push keep the time that they had left; time in which artd did not run does not count.
Nobody acts on a stored deadline between a jump and its correction (`ClockWatch.jumped`). The meta row `retention` holds why deletion
by age has stopped.
"""

from __future__ import annotations

import sqlite3

import anyio

from artd.clock import Clock
from artd.core.deadlines import DRIFT_MS, JUMP_MS, LARGE_MS, days, distrust, time_left
from artd.store.store import Store, emit, get_meta, set_meta
from artd.tables.groups import set_deadline
from artd.tables.jobs import delay_job
from artd.tables.pushes import delay_push

PERIOD_S = 1.0
LONGEST_DELAY_MS = 300_000  # the longest back-off of a job, see core.decide
STOPPED = "retention"
GROUPS = (
    "SELECT g.id, g.deadline, coalesce(CASE WHEN json_valid(CAST(r.spec AS TEXT))"
    " THEN CAST(json_extract(CAST(r.spec AS TEXT), '$.group_timeout_s') * 1000 AS INTEGER) END,"
    " max(0, g.deadline - g.created)) AS longest"  # the spec may be unreadable: its run is paused later in the boot
    " FROM trajectory_group g JOIN run r ON r.id = g.run_id WHERE g.state = 'open'"
)
NEWEST = "SELECT at FROM event ORDER BY id DESC LIMIT 1"
SEEN = "seen"
"""Meta row: when a daemon last ran while deadlines were stored. Without it, a killed daemon would give each deadline back
the time since the newest event."""
WAITING = (
    "SELECT 1 FROM trajectory_group WHERE state = 'open' UNION ALL SELECT 1 FROM job WHERE state = 'queued' AND not_before > 0"
    " UNION ALL SELECT 1 FROM push WHERE state = 'prepared' AND not_before > 0 LIMIT 1"
)


class ClockWatch:
    """Compares the wall clock with the monotonic clock during one boot, and corrects deadlines by the difference."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clock: Clock = store.clock
        self._offset = self._measure()

    async def run(self) -> None:
        """Compare the clocks once a second, until cancelled."""
        while True:
            await self.correct_deadlines()
            await anyio.sleep(PERIOD_S)

    def jumped(self) -> bool:
        """Return whether the clock has jumped and stored deadlines have not been corrected yet. Until then none of them counts."""
        return abs(self._measure() - self._offset) > JUMP_MS

    async def correct_deadlines(self) -> None:
        """Correct stored deadlines if the clock moved. While there are any, also store the time as proof that artd runs."""
        offset = self._measure()
        drift = offset - self._offset
        if abs(drift) > DRIFT_MS:
            await self._store.write(lambda c: follow(c, self._clock.now_ms(), drift))
            self._offset = offset  # only now: a failed write has corrected nothing
        elif await self._store.read(WAITING):
            await self._store.write(lambda c: set_meta(c, SEEN, str(self._clock.now_ms())))

    def _measure(self) -> int:
        return self._clock.now_ms() - int(self._clock.monotonic() * 1000)


def follow(c: sqlite3.Connection, now: int, drift: int) -> None:
    """Move every stored deadline by `drift`: the milliseconds that the wall clock gained on the monotonic one.

    A jump is written as an event, and a large jump stops deletion by age.
    """
    shift(c, now - drift, now)
    set_meta(c, SEEN, str(now))
    if abs(drift) > JUMP_MS:
        emit(c, now, "", "clock.jumped", "", seconds=drift / 1000)
    if abs(drift) > LARGE_MS:
        stop_retention(c, now, f"the clock jumped {days(abs(drift))} {'ahead' if drift > 0 else 'back'}")


def boot(c: sqlite3.Connection, now: int) -> None:
    """Make the first write of a boot: give deadlines the time that they had left when the last daemon stopped."""
    row = c.execute(NEWEST).fetchone()
    if row is None:
        return
    seen = max(row["at"], int(get_meta(c, SEEN, "0")))
    shift(c, seen, now)
    set_meta(c, SEEN, str(now))
    if why := distrust(seen, now):
        stop_retention(c, now, why)


def shift(c: sqlite3.Connection, before: int, now: int) -> None:
    """Give every stored deadline, counted from `now`, the time that it had left at `before`. Both are milliseconds since the
    epoch."""
    for group in c.execute(GROUPS).fetchall():
        left = time_left(group["deadline"], before, now, group["longest"], group["longest"])
        set_deadline(c, group["id"], now + left)
    for table, state, delay in (("job", "queued", delay_job), ("push", "prepared", delay_push)):
        delayed = f"SELECT id, not_before FROM {table} WHERE state = ? AND not_before > 0"
        for row in c.execute(delayed, (state,)).fetchall():
            left = time_left(row["not_before"], before, now, LONGEST_DELAY_MS, 0)
            delay(c, row["id"], now + left)


def stop_retention(c: sqlite3.Connection, now: int, why: str) -> None:
    """Stop deletion by age; `why` is kept, and the first reason stays."""
    if not get_meta(c, STOPPED):
        set_meta(c, STOPPED, why)
        emit(c, now, "", "retention.stopped", "", why=why)


def resume_retention(c: sqlite3.Connection, now: int) -> None:
    """Let deletion by age go on: an operator has looked at the clock."""
    if get_meta(c, STOPPED):
        set_meta(c, STOPPED, "")
        emit(c, now, "", "retention.resumed")
