"""Writes of the table `run`. Callers decide; each function is one statement in their transaction."""

from __future__ import annotations

import sqlite3

from artd.store.store import move
from artd_schema.codec import to_json
from artd_schema.data.base import BaseModel


def insert_run(c: sqlite3.Connection, now: int, name: str, spec: bytes, base: BaseModel, routes: bytes) -> int | None:
    """Insert an active run at no step; returns its id."""
    return c.execute(
        "INSERT INTO run (name, spec, base_digest, base_manifest, vocab_size, routes, state, next_epoch, created)"
        " VALUES (?, ?, ?, ?, ?, ?, 'active', 1, ?)",
        (name, spec, base.digest, to_json(base), base.vocab_size, routes, now),
    ).lastrowid


def pause_run(c: sqlite3.Connection, run: int) -> None:
    move(c, "run", run, "paused")


def resume_run(c: sqlite3.Connection, run: int) -> None:
    move(c, "run", run, "active", reason="")


def finish_run(c: sqlite3.Connection, run: int) -> None:
    move(c, "run", run, "finished", reason="")


def set_reason(c: sqlite3.Connection, run: int, reason: str) -> None:
    c.execute("UPDATE run SET reason = ? WHERE id = ?", (reason, run))


def set_learning(c: sqlite3.Connection, run: int, learning: bytes) -> None:
    """Set what the run's next batch is trained with: JSON Learning."""
    c.execute("UPDATE run SET learning = ? WHERE id = ?", (learning, run))


# ---- steps ----------------------------------------------------------------------------------------------------------


def advance_run(c: sqlite3.Connection, run: int, step: int, checkpoint: int | None, parent: int | None) -> bool:
    """Make `checkpoint` the newest one; returns False when the run is not at `parent`, one step before."""
    changed = c.execute(
        "UPDATE run SET checkpoint_id = ?, step = ? WHERE id = ? AND checkpoint_id IS ? AND step = ?",
        (checkpoint, step, run, parent, step - 1),
    ).rowcount
    return changed == 1


def rewind_run(c: sqlite3.Connection, run: int, step: int, checkpoint: int, lineage: int) -> None:
    c.execute("UPDATE run SET checkpoint_id = ?, step = ?, lineage = ? WHERE id = ?", (checkpoint, step, lineage, run))


def forget_newest(c: sqlite3.Connection, run: int) -> None:
    """Leave the run without a checkpoint."""
    c.execute("UPDATE run SET checkpoint_id = NULL, step = -1 WHERE id = ?", (run,))


def note_packed(c: sqlite3.Connection, run: int) -> None:
    """Count the run's next epoch as used by a batch, and end a flush."""
    c.execute("UPDATE run SET next_epoch = next_epoch + 1, flush = 0 WHERE id = ?", (run,))


def note_evaluations(c: sqlite3.Connection, run: int, newest: int) -> None:
    """Mark evaluations up to trajectory `newest`: the metrics of a step count them."""
    c.execute("UPDATE run SET told = ? WHERE id = ?", (newest, run))


def note_packing(c: sqlite3.Connection, run: int, failure: bytes | None) -> None:
    """Set what the packer fails at: JSON, or None when it does not fail."""
    c.execute("UPDATE run SET packing = ? WHERE id = ?", (failure, run))


# ---- flushes --------------------------------------------------------------------------------------------------------


def begin_flush(c: sqlite3.Connection, run: int) -> None:
    """Ask for all groups that are open now to be sealed."""
    c.execute("UPDATE run SET flush_to = (SELECT coalesce(max(id), 0) FROM trajectory_group) WHERE id = ?", (run,))


def note_flushed(c: sqlite3.Connection, run: int) -> None:
    """End the sealing of a flush: the packer may pack what there is."""
    c.execute("UPDATE run SET flush = 1, flush_to = 0 WHERE id = ?", (run,))


def end_flush(c: sqlite3.Connection, run: int) -> None:
    """End a flush that has nothing left to pack."""
    c.execute("UPDATE run SET flush = 0 WHERE id = ?", (run,))


# ---- deletion, restore ----------------------------------------------------------------------------------------------


def rename_run(c: sqlite3.Connection, run: int, name: str) -> None:
    c.execute("UPDATE run SET name = ? WHERE id = ?", (name, run))


def leap_epochs(c: sqlite3.Connection, leap: int) -> None:
    c.execute("UPDATE run SET next_epoch = next_epoch + ? WHERE state <> 'finished'", (leap,))


def take_epoch(c: sqlite3.Connection, run: int) -> None:
    c.execute("UPDATE run SET next_epoch = next_epoch + 1 WHERE id = ?", (run,))
