"""Writes of the table `process`: the workers' processes. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3

from artd.store.store import move
from artd.supervise.spec import Info
from artd.supervise.states import State
from artd_schema.wire.worker_names import parse_worker


def number_spawn(c: sqlite3.Connection, now: int, name: str, boot: int) -> int:
    """Return the number of the worker's next process."""
    _ensure(c, now, name, boot, "starting")
    c.execute("UPDATE process SET spawn = spawn + 1 WHERE name = ?", (name,))
    return int(c.execute("SELECT spawn FROM process WHERE name = ?", (name,)).fetchone()[0])


def note_state(c: sqlite3.Connection, now: int, name: str, boot: int, state: State, info: Info, error: str) -> None:
    address = ", address = ''" if state != "ready" else ""
    _ensure(c, now, name, boot, state)
    c.execute(
        f"UPDATE process SET state = ?, boot = ?, since = ?{address}, boot_id = ?, pid = ?, ticks = ?, session = ?, restarts = ?,"
        " error = ?, log = ? WHERE name = ?",
        (
            *(state, boot, now, info.boot_id, info.pid, info.ticks, info.session),
            *(info.restarts, error, info.log, name),
        ),
    )


def note_missing(c: sqlite3.Connection, now: int, name: str, boot: int, error: str) -> bool:
    """Say why a worker cannot be started. Returns False if its row says so already."""
    if c.execute("SELECT 1 FROM process WHERE name = ? AND error = ?", (name, error)).fetchone():
        return False
    _ensure(c, now, name, boot, "stopped")
    c.execute("UPDATE process SET error = ? WHERE name = ?", (error, name))
    return True


def _ensure(c: sqlite3.Connection, now: int, name: str, boot: int, state: str) -> None:
    """Insert the worker's row if there is none. `state` is that of a new row."""
    worker = parse_worker(name)
    c.execute(
        "INSERT INTO process (name, kind, run_id, replica, state, boot, since) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (name) DO NOTHING",
        (name, worker.kind, worker.run or None, worker.replica, state, boot, now),
    )


def set_held(c: sqlite3.Connection, engine: str, fence: int) -> None:
    """Note that the gateway is asked to hold an engine for the push of this fence."""
    c.execute("UPDATE process SET held = ? WHERE name = ?", (fence, engine))


def delete_processes(c: sqlite3.Connection, run: int) -> None:
    """Delete the rows of a run's workers."""
    c.execute("DELETE FROM process WHERE run_id = ?", (run,))


def set_address(c: sqlite3.Connection, name: str, address: str) -> None:
    c.execute("UPDATE process SET address = ? WHERE name = ?", (address, name))


def mark_busy(c: sqlite3.Connection, now: int, name: str) -> None:
    move(c, "process", name, "busy", start="ready", since=now)


def mark_free(c: sqlite3.Connection, now: int, name: str) -> None:
    """Mark a busy worker as ready; any other stays as it is."""
    c.execute("UPDATE process SET state = 'ready', since = ? WHERE name = ? AND state = 'busy'", (now, name))


def stop_all(c: sqlite3.Connection, now: int) -> None:
    """Mark every worker as stopped. None lives any more."""
    c.execute(
        "UPDATE process SET state = 'stopped', pid = NULL, ticks = NULL, session = NULL, address = '', since = ?"
        " WHERE state <> 'stopped'",
        (now,),
    )


def leap_spawns(c: sqlite3.Connection, leap: int) -> None:
    c.execute("UPDATE process SET spawn = spawn + ?", (leap,))
