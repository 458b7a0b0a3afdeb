"""Watches free space and inodes: too little stops work that would fill the disk further, until space returns.

Owns `DATA/reserve`, the last reading, the meta row `disk`, which says why the daemon admits nothing. It calls statvfs
at most once a second, however many requests come. Work that stopped at the low mark goes on at the high mark, so that
it does not flap. The reserve counts as used whether it exists or not.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

import anyio
import anyio.to_thread

from artd.clock import Clock
from artd.errors import Busy
from artd.store import fs
from artd.store.store import Store, emit, get_meta, set_meta

log = logging.getLogger(__name__)
PERIOD_S = 1.0
STALE_S = 5.0
"""A request reads the disk itself only if `run` has not done so for this long."""
HEALED = 1.25
"""The high mark, as a multiple of the low one."""
LOW_FILES = 256
"""The low mark of free inodes: a submit, a step and a push together make some tens of files."""
HELP = "Free space, or make it writable; artd continues by itself"
STATE = "disk"
RESERVE = "reserve"


def give_up(root: Path) -> None:
    """Remove the reserve. Any thread may call this; the writer's thread does when it has no room to commit."""
    try:
        (root / RESERVE).unlink()
    except (FileNotFoundError, PermissionError):
        return
    except OSError as error:
        if not fs.is_full(error):
            raise
        return
    log.warning("the disk of %s is full: artd removed its reserve", root)


class Disk:
    """Watches the file system of the data folder.

    `min_free` is the low mark in bytes. `reserve` is the size in bytes of a file that the daemon removes when the disk is full, so
    that it can still write its rows and end in order; it makes the file again later.
    """

    def __init__(self, root: Path, min_free: int, clock: Clock, reserve: int = 0) -> None:
        self._root = root
        self._low = min_free
        self._high = int(min_free * HEALED)
        self._clock = clock
        self._reserve = reserve
        self._file = root / RESERVE
        self._read_at = float("-inf")
        self._raw = self._free = 0
        self._why = ""
        self._recorded: str | None = None
        self._age_s = PERIOD_S

    def free(self) -> int:
        """Return how many bytes this user may still write, without the reserve."""
        self._look()
        return self._free

    def why(self) -> str:
        """Return why the daemon admits nothing, "" if it does."""
        self._look()
        return self._why

    def require(self) -> None:
        """Check that there is enough space. Raises Busy when there is not."""
        if why := self.why():
            raise Busy(f"{why}; {max(0, self._free) >> 20} MiB are free now. {HELP}", retry_after_s=5.0)

    def lacks(self, needed: int) -> str:
        """Return why work that writes `needed` bytes must wait, "" if at least the low mark stays free."""
        if self.why():
            return self._why
        if self._free >= needed + self._low:
            return ""
        return f"{(needed + self._low) >> 20} MiB must be free under {self._root}"

    async def run(self, store: Store) -> None:
        """Keep the reserve and record every change, until cancelled."""
        self._age_s = STALE_S
        while True:
            await self.tend(store)
            await anyio.sleep(PERIOD_S)

    async def tend(self, store: Store) -> None:
        """Look once; remove the reserve or make it again; record a change in a row."""
        await anyio.to_thread.run_sync(self._tend_files)  # in a thread, because the file system may hang
        why = self._why
        if why != self._recorded:
            await store.write(lambda c: _record(c, self._clock.now_ms(), why))
            self._recorded = why

    def _tend_files(self) -> None:
        self._look(PERIOD_S)
        fs.remove_left()
        if self._raw < self._reserve // 4:
            give_up(self._root)
        elif not self._why and not self._has_reserve():
            self._make_reserve()

    def _look(self, age_s: float | None = None) -> None:
        """Read the disk, unless the last reading is younger than `age_s`."""
        now = self._clock.monotonic()
        if now - self._read_at < (age_s or self._age_s):
            return
        found = os.statvfs(self._root)
        self._read_at, self._raw = now, found.f_bavail * found.f_frsize
        self._free = self._raw if self._has_reserve() else self._raw - self._reserve
        marks = (self._high, int(LOW_FILES * HEALED)) if self._why else (self._low, LOW_FILES)
        if found.f_flag & os.ST_RDONLY:
            self._why = f"{self._root} is mounted read-only"
        elif found.f_files and found.f_favail < marks[1]:  # a file system without a table of inodes reports 0
            self._why = (
                f"the file system of {self._root} has {found.f_favail} inodes left, and artd takes nothing more until "
                f"{int(LOW_FILES * HEALED)} are free: remove files there"
            )
        elif self._free < marks[0]:
            self._why = (
                f"the disk of {self._root} is nearly full, and artd takes nothing more until {self._high >> 20} MiB are free "
                "(limits.min_free_mib)"
            )
        else:
            self._why = ""

    def _has_reserve(self) -> bool:
        """Return whether the reserve exists, or none is wanted."""
        try:
            return self._reserve == 0 or self._file.stat().st_size == self._reserve
        except FileNotFoundError:
            return False

    def _make_reserve(self) -> None:
        """Make the reserve, if the disk has room for it."""
        try:
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, self._reserve)
            finally:
                os.close(handle)
        except OSError as error:
            self._file.unlink(missing_ok=True)
            log.warning("cannot make a reserve of %d MiB: %s", self._reserve >> 20, error)


def _record(c: sqlite3.Connection, now: int, why: str) -> None:
    if get_meta(c, STATE) != why:
        set_meta(c, STATE, why)
        emit(c, now, "", "disk.low" if why else "disk.healed", "", **({"why": why} if why else {}))
