"""What becomes of a batch that cannot be packed: who is to blame, and who is told.

It owns `run.packing` (the batch of a run that the packer fails at now) and the meta row `packer.blamed` (groups that were discarded because
the packing code fails on them, until somebody takes note). Invariants: a failed read is never the data's fault: what cannot be read is tried
again, and what has other bytes than were acknowledged pauses the run; a group is discarded for what the packing code cannot do only where
that code packs another group.
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
"""Blamed groups that the status knows."""
RETRY_S = (0.0, 5.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""After the first failure, which may be a child's chance death, the second, and so on."""


def delay_s(failed: int) -> float:
    """How long to wait after so many failures in a row."""
    return RETRY_S[min(failed, len(RETRY_S)) - 1]


def settle(c: sqlite3.Connection, now: int, request: PackRequest, groups: Sequence[int], answer: PackFailure) -> bool:
    """Do what a failure asks for; True when there is something else to do at once. groups: ids of the batch's."""
    row = c.execute("SELECT group_id FROM trajectory WHERE id = ?", (answer.trajectory,)).fetchone()
    if answer.kind == "damaged" and row is not None:
        return suspect(c, now, request, row["group_id"], answer)
    bad = ([row["group_id"]] if row else []) if answer.trajectory else (groups if answer.drops else [])
    if answer.kind != "data" or not bad:
        note(c, now, request, answer)
        return False
    _told(c, now, request, answer)
    for group in bad:
        if c.execute("SELECT 1 FROM trajectory_group WHERE id = ? AND state = 'sealed'", (group,)).fetchone():
            discard(c, now, group, answer.error)
    own = [(drop.reason, drop.trajectory) for drop in answer.drops]
    note_drops(c, own)
    return True


def suspect(c: sqlite3.Connection, now: int, request: PackRequest, group: int, answer: PackFailure) -> bool:
    """Pause the run for a group that cannot be packed: an operator decides what becomes of it. True unless the group is not sealed
    any more."""
    row = c.execute("SELECT run_id, name FROM trajectory_group WHERE id = ? AND state = 'sealed'", (group,)).fetchone()
    if row is None:
        return False
    _told(c, now, request, answer)
    reason = f"group {row['name']!r} cannot be packed: {answer.error}"
    pauses.hold(c, now, row["run_id"], pauses.of_group(group), reason)
    return True


def discard(c: sqlite3.Connection, now: int, group: int, reason: str) -> None:
    """Discard an open or sealed group with its trajectories, for good."""
    row = c.execute(
        "SELECT g.name, g.run_id, r.name AS run FROM trajectory_group g JOIN run r ON r.id = g.run_id WHERE g.id = ?",
        (group,),
    ).fetchone()
    mark_discarded(c, group, reason)
    discard_queued(c, group, reason)
    emit(c, now, row["run"], "group.discarded", row["name"], reason=reason)
    pauses.lift(c, now, row["run_id"], pauses.of_group(group))


def blame(c: sqlite3.Connection, now: int, group: int, error: str) -> bool:
    """Discard the group on which the packing code fails, and have the status say so until somebody takes note; False when the group is
    not sealed any more."""
    row = c.execute(
        "SELECT g.name, g.run_id, r.name AS run FROM trajectory_group g JOIN run r ON r.id = g.run_id"
        " WHERE g.id = ? AND g.state = 'sealed'",
        (group,),
    ).fetchone()
    if row is None:
        return False
    told = blamed(c)
    told.append({"run": row["run"], "group": row["name"], "error": error})
    set_meta(c, BLAMED, msgspec.json.encode(told[-KEPT:]).decode())
    discard(c, now, group, f"the packer fails on it: {error}")
    clear(c, row["run_id"])
    return True


def blamed(c: sqlite3.Connection) -> list[dict[str, str]]:
    """{run, group, error} of groups that nobody has taken note of."""
    found: list[dict[str, str]] = msgspec.json.decode(get_meta(c, BLAMED, "[]"))
    return found


def take_note(c: sqlite3.Connection, run: str, group: str = "") -> None:
    """Forget what the status says of a blamed group, or of all of a run."""
    told = blamed(c)
    left = [one for one in told if one["run"] != run or group not in ("", one["group"])]
    if left != told:
        set_meta(c, BLAMED, msgspec.json.encode(left).decode())


# ---- what is tried again ------------------------------------------------------------------------------------------------


def note(c: sqlite3.Connection, now: int, request: PackRequest, answer: PackFailure) -> None:
    """The batch is tried again: the status says why. An event tells of each new error, not of each try."""
    run = c.execute("SELECT id FROM run WHERE name = ?", (request.run,)).fetchone()["id"]
    known = failing(c, run)
    tries = known["tries"] if known and known["step"] == request.step else 0
    if not tries or not known or known["error"] != answer.error:
        _told(c, now, request, answer)
    told = {"step": request.step, "error": answer.error, "tries": tries + 1, "at": now}
    note_packing(c, run, msgspec.json.encode(told))


def failing(c: sqlite3.Connection, run: int) -> dict[str, Any] | None:
    """Return {step, error, tries, at} of the run's batch that the packer fails at, None when there is none."""
    (told,) = c.execute("SELECT packing FROM run WHERE id = ?", (run,)).fetchone()
    return msgspec.json.decode(told) if told else None


def clear(c: sqlite3.Connection, run: int) -> None:
    """Forget the failure of a run's batch."""
    if failing(c, run):
        note_packing(c, run, None)


def _told(c: sqlite3.Connection, now: int, request: PackRequest, answer: PackFailure) -> None:
    emit(
        c, now, request.run, "batch.failed", request.step, error=answer.error, trajectory=answer.trajectory,
        position=answer.position,
    )  # fmt: skip
