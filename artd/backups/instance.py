"""Turns the rows of a backup into those of a new instance, in the one transaction of a restore.

Nobody can mistake something that the original did after the backup for something that the new instance does. The
numbers that name things outside the database continue far above any that the original can have used: a policy epoch
names one weights digest for ever, and is on tokens that rollout programs hold; jobs, fences and spawns name folders;
events are cursors of trackers. Unfinished jobs get new numbers too, because the original may have finished them with
another result.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import uuid
from pathlib import Path

from artd.recover import interrupt
from artd.store.store import delete_meta, get_meta, set_meta
from artd.tables.jobs import renumber_job
from artd.tables.processes import leap_spawns
from artd.tables.runs import leap_epochs, take_epoch

LEAP = 1 << 20
"""Numbers leap by a random amount from LEAP up to twice LEAP, so that two restores of one backup get different numbers too."""
SPAWN_LEAP = 1000
"""The leap of spawns. It is smaller because a spawn names the folder of its sockets, whose paths must stay short."""
SEQUENCES = ("job", "push", "event")
FORGOTTEN = ("gateway_token", "gateway_url", "gateway_port")
UNFINISHED = "SELECT id, run_id FROM job WHERE state IN ('queued', 'quarantined') ORDER BY id"


def renew(c: sqlite3.Connection, now: int, database: Path) -> tuple[str, int]:
    """Create a new instance id, and take back work under way, as at a boot: running jobs return to the queue, and no
    checkpoint is served.

    `database` is the file with these rows, which may have any name. Returns the instance id and the leap, by which
    numbers continue above the original's.
    """
    leap = _leap(LEAP)
    for table in SEQUENCES:
        _leap_sequence(c, table, leap)
    interrupt(c, now, "the backup was taken")
    leap_spawns(c, _leap(SPAWN_LEAP))
    leap_epochs(c, leap)
    for job, run in c.execute(UNFINISHED).fetchall():
        renumber_job(c, job, run, leap)
        take_epoch(c, run)
    delete_meta(c, *FORGOTTEN)
    set_meta(c, "push_fence", str(int(get_meta(c, "push_fence", "0")) + leap))
    instance, place = uuid.uuid4().hex, os.stat(database)
    set_meta(c, "instance", instance)
    set_meta(c, "place", f"{place.st_dev}:{place.st_ino}")
    set_meta(c, "created", str(now))
    set_meta(c, "clean", "1")
    return instance, leap


def _leap(least: int) -> int:
    return least + secrets.randbelow(least)


def _leap_sequence(c: sqlite3.Connection, table: str, leap: int) -> None:
    """Raise the next id of a table by `leap`."""
    changed = c.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = ?", (leap, table)).rowcount
    if not changed:
        c.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, leap))
