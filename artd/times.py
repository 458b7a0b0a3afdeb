"""Jumps of the wall clock: stored deadlines keep the time that they had left, and nothing is deleted by its age meanwhile.

Owner of: the deadlines of open groups and delayed jobs and pushes once they are stored; the meta row `retention`, which
holds why retention has stopped. Invariants: nobody acts on a stored deadline between a jump and its correction
(`jumped`); time in which artd did not run does not count.
"""

from __future__ import annotations

import sqlite3

import anyio

from .clock import Clock
from .core.deadlines import JUMP_MS, LARGE_MS, days, distrust, time_left
from .store.store import Store, emit, get_meta, set_meta

PERIOD_S = 1.0
LONGEST_DELAY_MS = 300_000  # of a job's back-off, see core.decide
STOPPED = "retention"
GROUPS = (
    "SELECT g.id, g.deadline, CAST(json_extract(CAST(r.spec AS TEXT), '$.group_timeout_s') * 1000 AS INTEGER) AS longest"
    " FROM trajectory_group g JOIN run r ON r.id = g.run_id WHERE g.state = 'open'"
)
SEEN = "SELECT at FROM event ORDER BY id DESC LIMIT 1"


class Times:
    """Compares the wall clock with the monotonic one, over one boot."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clock: Clock = store.clock
        self._offset = self._measure()

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await self.heed()
            await anyio.sleep(PERIOD_S)

    def jumped(self) -> bool:
        """Whether the clock jumped and stored deadlines have not followed yet: until then none of them counts."""
        return abs(self._measure() - self._offset) > JUMP_MS

    async def heed(self) -> None:
        """Let stored deadlines follow a jump."""
        offset = self._measure()
        if abs(offset - self._offset) > JUMP_MS:
            await self._store.write(lambda c: follow(c, self._clock.now_ms(), offset - self._offset))
        self._offset = offset  # only now: a write that failed would have followed nothing

    def _measure(self) -> int:
        return self._clock.now_ms() - int(self._clock.monotonic() * 1000)


def follow(c: sqlite3.Connection, now: int, jump: int) -> None:
    """After a jump of so many milliseconds: deadlines go with it, and a large one stops retention."""
    shift(c, now - jump, now)
    emit(c, now, "", "clock.jumped", "", seconds=jump / 1000)
    if abs(jump) > LARGE_MS:
        stop_retention(c, now, f"the clock jumped {days(abs(jump))} {'ahead' if jump > 0 else 'back'}")


def boot(c: sqlite3.Connection, now: int) -> None:
    """The first write of a boot: deadlines go on where the last daemon left them."""
    row = c.execute(SEEN).fetchone()
    if row is None:
        return
    shift(c, row["at"], now)
    if why := distrust(row["at"], now):
        stop_retention(c, now, why)


def shift(c: sqlite3.Connection, before: int, now: int) -> None:
    """Give every stored deadline the time that it had left at `before`, from `now` on."""
    for group in c.execute(GROUPS).fetchall():
        left = time_left(group["deadline"], before, now, group["longest"], group["longest"])
        c.execute("UPDATE trajectory_group SET deadline = ? WHERE id = ?", (now + left, group["id"]))
    for table, state in (("job", "queued"), ("push", "prepared")):
        delayed = f"SELECT id, not_before FROM {table} WHERE state = ? AND not_before > 0"
        for row in c.execute(delayed, (state,)).fetchall():
            left = time_left(row["not_before"], before, now, LONGEST_DELAY_MS, 0)
            c.execute(f"UPDATE {table} SET not_before = ? WHERE id = ?", (now + left, row["id"]))


def stop_retention(c: sqlite3.Connection, now: int, why: str) -> None:
    if not get_meta(c, STOPPED):
        set_meta(c, STOPPED, why)
        emit(c, now, "", "retention.stopped", "", why=why)


def resume_retention(c: sqlite3.Connection, now: int) -> None:
    """Somebody has looked: ages count again."""
    if get_meta(c, STOPPED):
        set_meta(c, STOPPED, "")
        emit(c, now, "", "retention.resumed")
