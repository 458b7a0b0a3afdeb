"""Compares manifests with rows, so that the files alone prove what was trained.

It reads a manifest once and compares its sha256. `files` reports missing and unreadable checkpoint manifests, so this
module skips them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from artd.datadir.layout import DataDir
from artd_schema.codec import UNREADABLE, digest, to_json
from artd_schema.data.manifest import MANIFEST_FILE, BatchManifest, CheckpointManifest, ReplayManifest

from .listing import Listing
from .report import Violation

T = TypeVar("T", BatchManifest, CheckpointManifest, ReplayManifest)
MEMBERS = "SELECT id FROM trajectory WHERE batch_id = ?"
MEMBER = "SELECT digest, group_id, reward FROM trajectory WHERE id = ?"


def checkpoint_manifests(data: DataDir, listing: Listing) -> Iterator[Violation]:
    """Check `checkpoint.manifest`: run, step, epoch, lineage, parent, batch, base, job and fence match the rows."""
    for row in listing.checkpoints:
        manifest = _read(data.root / row["dir"] / MANIFEST_FILE, CheckpointManifest)
        if manifest is not None:
            names = ("run", "step", "epoch", "lineage", "parent", "batch", "base_digest", "job", "fence", "parameters")
            for text in _differences(manifest, {name: row[name] for name in names}):
                yield Violation(row["dir"], text)


def batch_manifests(data: DataDir, listing: Listing, c: sqlite3.Connection) -> Iterator[Violation]:
    """Check `batch.manifest`: numbers and names match the row, the members match the trajectories, and the replay bundle
    belongs to this batch."""
    for row in listing.batches:
        manifest = _read(Path(data.blob(row["manifest"])), BatchManifest)
        if manifest is None:
            yield Violation(f"batch {row['id']}", "its manifest cannot be read, or is not the one of its row")
            continue
        for text in (*_batch(row, manifest), *_members(row, manifest, c), *_bundle(data, row, manifest)):
            yield Violation(f"batch {row['id']}", text)


def _batch(row: sqlite3.Row, manifest: BatchManifest) -> Iterator[str]:
    expected = {"run": row["run"], "step": row["step"], "base_digest": row["base_digest"],
                "physical_tokens": row["tokens"], "replay": row["replay_manifest"] or ""}  # fmt: skip
    yield from _differences(manifest, expected)
    if len(manifest.trajectories) != row["trajectories"]:
        yield f"its manifest lists {len(manifest.trajectories)} trajectories, its row {row['trajectories']}"
    fill = manifest.physical_tokens / (manifest.rows * manifest.row_length)
    if abs(fill - row["fill"]) > 1e-9:
        yield f"its manifest's fill is {fill}, its row's {row['fill']}"


def _members(row: sqlite3.Row, manifest: BatchManifest, c: sqlite3.Connection) -> Iterator[str]:
    """Compare a manifest's trajectories with their rows. The trajectories of an abandoned batch may be in another batch by
    now, but their digest, group and reward stay."""
    packed = [entry.id for entry in manifest.trajectories if entry.rows]
    if row["state"] != "abandoned":
        members = {found[0] for found in c.execute(MEMBERS, (row["id"],))}
        if odd := sorted(members ^ set(packed)):
            yield f"trajectories {_join(odd)} are in its manifest or among its rows, but not in both"
    if len(set(packed)) != len(packed):
        yield "its manifest lists a trajectory twice"
    for entry in manifest.trajectories:
        found = c.execute(MEMBER, (entry.id,)).fetchone()
        if found is None:
            yield f"trajectory {entry.id} of its manifest does not exist"
        elif tuple(found) != (entry.digest, entry.group, entry.reward):
            yield f"trajectory {entry.id} has another digest, group or reward than in its manifest"


def _bundle(data: DataDir, row: sqlite3.Row, manifest: BatchManifest) -> Iterator[str]:
    if not row["replay_manifest"]:
        return
    replay = _read(Path(data.blob(row["replay_manifest"])), ReplayManifest)
    if replay is None:
        yield "the manifest of its replay bundle cannot be read, or is not the one of its row"
        return
    expected = {"run": row["run"], "step": row["step"], "token_digest": manifest.token_digest, "rows": manifest.rows,
                "row_length": manifest.row_length, "tokens": row["tokens"], "covered": row["covered"]}  # fmt: skip
    yield from (f"replay bundle: {text}" for text in _differences(replay, expected))
    if to_json(replay.shape) != row["routes"]:
        yield "replay bundle: its shape is not the run's"


def _read(path: Path, kind: type[T]) -> T | None:
    """Read the manifest in a blob or a folder. Returns None if it cannot be read, or if a blob's bytes have another sha256."""
    try:
        raw = path.read_bytes()
        if path.name != MANIFEST_FILE and digest(raw) != path.name:
            return None
        return msgspec.json.decode(raw, type=kind)
    except (OSError, *UNREADABLE):
        return None


def _differences(manifest: object, expected: dict[str, Any]) -> Iterator[str]:
    for name, value in expected.items():
        if (found := getattr(manifest, name)) != value:
            yield f"its manifest's {name} is {found!r}, the rows' {value!r}"


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
