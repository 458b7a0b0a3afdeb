"""Writes of the table `process`: the workers' processes. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3

from artd.store.store import move
from artd.supervise.spec import Info
from artd.supervise.states import State


def number_spawn(c: sqlite3.Connection, now: int, name: str, boot: int) -> int:
    """Return the number of the worker's next process."""
    c.execute(
        "INSERT INTO process (name, kind, state, boot, spawn, since) VALUES (?, ?, 'starting', ?, 1, ?)"
        " ON CONFLICT (name) DO UPDATE SET spawn = spawn + 1",
        (name, name, boot, now),
    )
    return int(c.execute("SELECT spawn FROM process WHERE name = ?", (name,)).fetchone()[0])


def note_state(c: sqlite3.Connection, now: int, name: str, boot: int, state: State, info: Info, error: str) -> None:
    address = ", address = ''" if state != "ready" else ""
    c.execute(
        "INSERT INTO process (name, kind, state, boot, since) VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
        f" state = excluded.state, boot = excluded.boot, since = excluded.since{address}",
        (name, info.kind, state, boot, now),
    )
    c.execute(
        "UPDATE process SET boot_id = ?, pid = ?, ticks = ?, session = ?, restarts = ?, error = ?, log = ? WHERE name = ?",
        (info.boot_id, info.pid, info.ticks, info.session, info.restarts, error, info.log, name),
    )


def note_missing(c: sqlite3.Connection, now: int, name: str, boot: int, error: str) -> bool:
    """Say why a worker cannot be started. Returns False if its row says so already."""
    if c.execute("SELECT 1 FROM process WHERE name = ? AND error = ?", (name, error)).fetchone():
        return False
    c.execute(
        "INSERT INTO process (name, kind, state, boot, error, since) VALUES (?, ?, 'stopped', ?, ?, ?)"
        " ON CONFLICT (name) DO UPDATE SET error = excluded.error",
        (name, name, boot, error, now),
    )
    return True


def set_address(c: sqlite3.Connection, name: str, address: str) -> None:
    c.execute("UPDATE process SET address = ? WHERE name = ?", (address, name))


def mark_busy(c: sqlite3.Connection, now: int, name: str) -> None:
    move(c, "process", name, "busy", start="ready", since=now)


def mark_free(c: sqlite3.Connection, now: int, name: str) -> None:
    """Mark a busy worker as ready; any other stays as it is."""
    c.execute("UPDATE process SET state = 'ready', since = ? WHERE name = ? AND state = 'busy'", (now, name))


def stop_all(c: sqlite3.Connection, now: int) -> None:
    """Mark every worker as stopped."""
    c.execute(
        "UPDATE process SET state = 'stopped', pid = NULL, ticks = NULL, session = NULL, address = '', since = ?",
        (now,),
    )


def leap_spawns(c: sqlite3.Connection, leap: int) -> None:
    c.execute("UPDATE process SET spawn = spawn + ?", (leap,))
