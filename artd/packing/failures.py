"""Decides what happens after a batch could not be packed: whose fault it is, and who learns of it.

Owns `run.packing` (the batch of a run on which the packer fails now) and the meta row `packer.blamed` (groups that were
discarded because the packing code fails on them, until an operator acknowledges them). A failed read is never the
data's fault: what cannot be read is tried again, and bytes that differ from the acknowledged ones pause the run. A
group is discarded for a failure of the packing code only if that code packs another group.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from artd.store.store import emit, get_meta, set_meta
from artd.tables import pauses
from artd.tables.groups import mark_discarded
from artd.tables.runs import note_packing
from artd.tables.trajectories import discard_queued, note_drops

from .child import PackFailure, PackRequest

BLAMED = "packer.blamed"
KEPT = 20
"""The most blamed groups that the status shows."""
RETRY_S = (0.0, 5.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds to wait after the first failure (which may be the accidental death of a child), the second, and so on."""


def delay_s(failed: int) -> float:
    """Return how long to wait after so many failures in a row, in seconds."""
    return RETRY_S[min(failed, len(RETRY_S)) - 1]


def settle(c: sqlite3.Connection, now: int, request: PackRequest, groups: Sequence[int], answer: PackFailure) -> bool:
    """Do what a failure requires. `groups` holds the ids of the batch's groups. Returns True if a next try makes sense
    at once."""
    row = c.execute("SELECT group_id FROM trajectory WHERE id = ?", (answer.trajectory,)).fetchone()
    if answer.kind == "damaged" and row is not None:
        return suspect(c, now, request, row["group_id"], answer)
    bad = ([row["group_id"]] if row else []) if answer.trajectory else (groups if answer.drops else [])
    if answer.kind != "data" or not bad:
        note(c, now, request, answer)
        return False
    _emit_failure(c, now, request, answer)
    for group in bad:
        if c.execute("SELECT 1 FROM trajectory_group WHERE id = ? AND state = 'sealed'", (group,)).fetchone():
            discard(c, now, group, answer.error)
    own = [(drop.reason, drop.trajectory) for drop in answer.drops]
    note_drops(c, own)
    return True


def suspect(c: sqlite3.Connection, now: int, request: PackRequest, group: int, answer: PackFailure) -> bool:
    """Pause the run because of a group that cannot be packed, so that an operator decides about the group. Returns
    False if the group is no longer sealed."""
    row = c.execute("SELECT run_id, name FROM trajectory_group WHERE id = ? AND state = 'sealed'", (group,)).fetchone()
    if row is None:
        return False
    _emit_failure(c, now, request, answer)
    reason = f"group {row['name']!r} cannot be packed: {answer.error}"
    pauses.hold(c, now, row["run_id"], pauses.of_group(group), reason)
    return True


def discard(c: sqlite3.Connection, now: int, group: int, reason: str) -> None:
    """Discard an open or sealed group and its trajectories for good."""
    row = c.execute(
        "SELECT g.name, g.run_id, r.name AS run FROM trajectory_group g JOIN run r ON r.id = g.run_id WHERE g.id = ?",
        (group,),
    ).fetchone()
    mark_discarded(c, group, reason)
    discard_queued(c, group, reason)
    emit(c, now, row["run"], "group.discarded", row["name"], reason=reason)
    pauses.lift(c, now, row["run_id"], pauses.of_group(group))


def blame(c: sqlite3.Connection, now: int, group: int, error: str) -> bool:
    """Discard the group on which the packing code fails, and show it in the status until an operator acknowledges it.
    Returns False if the group is no longer sealed."""
    row = c.execute(
        "SELECT g.name, g.run_id, r.name AS run FROM trajectory_group g JOIN run r ON r.id = g.run_id"
        " WHERE g.id = ? AND g.state = 'sealed'",
        (group,),
    ).fetchone()
    if row is None:
        return False
    told = list_blamed(c)
    told.append({"run": row["run"], "group": row["name"], "error": error})
    set_meta(c, BLAMED, msgspec.json.encode(told[-KEPT:]).decode())
    discard(c, now, group, f"the packer fails on it: {error}")
    clear(c, row["run_id"])
    return True


def list_blamed(c: sqlite3.Connection) -> list[dict[str, str]]:
    """Return {run, group, error} of each blamed group that no operator has acknowledged."""
    found: list[dict[str, str]] = msgspec.json.decode(get_meta(c, BLAMED, "[]"))
    return found


def take_note(c: sqlite3.Connection, run: str, group: str = "") -> None:
    """Acknowledge a blamed group of a run, or all of them: the status shows them no longer."""
    told = list_blamed(c)
    left = [one for one in told if one["run"] != run or group not in ("", one["group"])]
    if left != told:
        set_meta(c, BLAMED, msgspec.json.encode(left).decode())


# ---- batches that are tried again -----------------------------------------------------------------------------------------


def note(c: sqlite3.Connection, now: int, request: PackRequest, answer: PackFailure) -> None:
    """Note why a batch is tried again, for the status. Each new error makes an event; a repeated one does not."""
    run = c.execute("SELECT id FROM run WHERE name = ?", (request.run,)).fetchone()["id"]
    known = failing(c, run)
    tries = known["tries"] if known and known["step"] == request.step else 0
    if not tries or not known or known["error"] != answer.error:
        _emit_failure(c, now, request, answer)
    told = {"step": request.step, "error": answer.error, "tries": tries + 1, "at": now}
    note_packing(c, run, msgspec.json.encode(told))


def failing(c: sqlite3.Connection, run: int) -> dict[str, Any] | None:
    """Return {step, error, tries, at} of the run's batch on which the packer fails, None if there is none."""
    (told,) = c.execute("SELECT packing FROM run WHERE id = ?", (run,)).fetchone()
    return msgspec.json.decode(told) if told else None


def clear(c: sqlite3.Connection, run: int) -> None:
    """Forget the failure of a run's batch."""
    if failing(c, run):
        note_packing(c, run, None)


def _emit_failure(c: sqlite3.Connection, now: int, request: PackRequest, answer: PackFailure) -> None:
    emit(
        c, now, request.run, "batch.failed", request.step, error=answer.error, trajectory=answer.trajectory,
        position=answer.position,
    )  # fmt: skip
