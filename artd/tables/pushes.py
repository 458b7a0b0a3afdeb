"""Writes of the table `push`. Callers decide; each function writes in their transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from artd.store.store import move
from artd_schema.wire.worker import Live


def prepare_push(c: sqlite3.Connection, now: int, run: int, engine: str, checkpoint: int, mode: str) -> None:
    c.execute(
        "INSERT INTO push (run_id, engine, checkpoint_id, mode, state, created) VALUES (?, ?, ?, ?, 'prepared', ?)",
        (run, engine, checkpoint, mode, now),
    )


def mark_sending(c: sqlite3.Connection, now: int, push: int, fence: int, source: str, transfer: str | None) -> None:
    move(c, "push", push, "sending", start="prepared", fence=fence, source=source, transfer=transfer, started=now)


def mark_live(c: sqlite3.Connection, message: Live) -> None:
    move(c, "push", message.push, "live", start="sending", max_abs=message.max_abs, mean_abs=message.mean_abs,
         seconds=msgspec.json.encode(message.seconds), error="")  # fmt: skip


def supersede_push(c: sqlite3.Connection, now: int, push: int, start: str) -> None:
    """Supersede a push, which must be in the state `start`."""
    move(c, "push", push, "superseded", start=start, ended=now)


def retry_push(c: sqlite3.Connection, push: int, attempts: int, error: str, not_before: int = 0) -> None:
    move(c, "push", push, "prepared", start="sending", attempts=attempts, error=error, not_before=not_before)


def fail_push(c: sqlite3.Connection, now: int, push: int, attempts: int, error: str) -> None:
    move(c, "push", push, "failed", start="sending", attempts=attempts, error=error, ended=now)


def delay_push(c: sqlite3.Connection, push: int, not_before: int) -> None:
    c.execute("UPDATE push SET not_before = ? WHERE id = ?", (not_before, push))


def hurry_pushes(c: sqlite3.Connection, run: int) -> None:
    """Let the run's pushes that wait for another attempt be tried at once."""
    c.execute("UPDATE push SET not_before = 0 WHERE run_id = ? AND state = 'prepared' AND not_before > 0", (run,))


def delete_pushes(c: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    c.executemany("DELETE FROM push WHERE id = ?", ids)
