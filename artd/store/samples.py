"""Chooses trajectories of a run for people to read, and reads their bodies.

The cost depends on `AMONG` and on the size of a batch, never on the length of the run.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from artd_schema.codec import UNREADABLE
from artd_schema.data.trajectory import Pick, Turn

from . import pages, selects
from .blobs import place
from .readonly import snapshot

AMONG = 1000
"""Without a step the choice is among this many of the newest trajectories."""
BATCH = """
SELECT coalesce(
  (SELECT j.batch_id FROM checkpoint k JOIN job j ON j.id = k.job_id
   WHERE k.run_id = :run AND k.step = :step AND k.abandoned = 0),
  (SELECT id FROM batch WHERE run_id = :run AND step = :step AND state = 'packed')) AS id"""
MEMBERS = "SELECT id, reward FROM trajectory WHERE batch_id = ?"
REWARDS = "SELECT id, reward FROM trajectory WHERE id IN (SELECT value FROM json_each(?))"
ROWS = f"SELECT * FROM ({selects.TRAJECTORIES}) WHERE id IN (SELECT value FROM json_each(?))"
BODY = """
SELECT d.body, t.blob, t.payload FROM trajectory t JOIN trajectory_data d ON d.trajectory_id = t.id WHERE t.id = ?"""
MANIFEST = "SELECT b.manifest FROM trajectory t JOIN batch b ON b.id = t.batch_id WHERE t.id = ?"
_turns = msgspec.msgpack.Decoder(list[Turn])


class Missing(Exception):
    """A trajectory's body is not there or cannot be read. The text says why."""


class Choice(NamedTuple):
    """Which trajectories: of the batch of `step`, or of the newest ones of a split if it is None; `pick` orders them."""

    step: int | None = None
    split: str = "train"
    pick: Pick = "newest"
    limit: int = 5


def choose(c: sqlite3.Connection, run: str, choice: Choice) -> list[sqlite3.Row]:
    """Return rows of trajectories (`selects.TRAJECTORIES`) in the order of the choice. A step that has no batch has none."""
    with snapshot(c):
        found = _of_step(c, run, choice.step) if choice.step is not None else _newest(c, run, choice.split)
        ids = _pick(found, choice)
        rows = {row["id"]: row for row in c.execute(ROWS, (json.dumps(ids),))}
    return [rows[number] for number in ids]


def _of_step(c: sqlite3.Connection, run: str, step: int) -> list[tuple[int, float]]:
    [number] = c.execute("SELECT id FROM run WHERE name = ?", (run,)).fetchone() or [None]
    [batch] = c.execute(BATCH, {"run": number, "step": step}).fetchone()
    return [(row["id"], row["reward"]) for row in c.execute(MEMBERS, (batch,))]


def _newest(c: sqlite3.Connection, run: str, split: str) -> list[tuple[int, float]]:
    ids = pages.read_ids(c, pages.Page("trajectories", run, split=split, limit=AMONG))
    return [(row["id"], row["reward"]) for row in c.execute(REWARDS, (json.dumps(ids),))]


def _pick(found: list[tuple[int, float]], choice: Choice) -> list[int]:
    """Return the ids that were chosen. Of equal rewards the newest comes first."""
    if choice.pick == "random":
        found = random.sample(found, min(choice.limit, len(found)))
    else:
        sign = {"newest": 0, "best": -1, "worst": 1}[choice.pick]
        found = sorted(found, key=lambda one: (sign * one[1], -one[0]))
    return [number for number, _ in found[: choice.limit]]


def read_body(c: sqlite3.Connection, blobs: Path, trajectory: int) -> bytes:
    """Return a trajectory's body, msgpack list[Turn]. `blobs` is the folder of blobs. Raises Missing."""
    body, sha, payload = c.execute(BODY, (trajectory,)).fetchone()
    if payload == "expired":
        raise Missing("its contents have expired (retention.trajectories_days)")
    if sha is None:
        return bytes(body or b"")  # without a body here or in a file the trajectory is damaged, as `decode_body` finds
    try:
        return (blobs / place(sha)).read_bytes()
    except OSError as error:
        raise Missing(f"{blobs / place(sha)} cannot be read: {error.strerror or error}") from None


def decode_body(body: bytes) -> Sequence[Turn]:
    """Decode a trajectory's body. Raises Missing if it is damaged."""
    try:
        return _turns.decode(body)
    except UNREADABLE as error:
        raise Missing(f"its body is damaged ({error}): artd check --deep says what is lost") from None


class _Packed(msgspec.Struct):
    id: int
    advantage: float
    rows: tuple[int, ...]


class _Manifest(msgspec.Struct):
    """What this page wants of a `BatchManifest`."""

    trajectories: list[_Packed]


def read_advantage(c: sqlite3.Connection, blobs: Path, trajectory: int) -> float | None:
    """Return the advantage with which each sampled token of a trajectory is trained; None if it is in no batch, or was left out of its batch's rows."""
    row = c.execute(MANIFEST, (trajectory,)).fetchone()
    if row is None:
        return None
    try:
        manifest = msgspec.json.decode((blobs / place(row["manifest"])).read_bytes(), type=_Manifest)
    except (*UNREADABLE, OSError):
        return None  # `artd check` names it
    return next((one.advantage for one in manifest.trajectories if one.id == trajectory and one.rows), None)
