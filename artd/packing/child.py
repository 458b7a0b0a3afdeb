"""`python -m artd.packing.child`: packs one batch; exec'ed by the daemon for each batch.

Request: one JSON object on stdin (`PackRequest`). Answer: one JSON line on stdout, `PackResult` with exit 0, or
`PackFailure` with exit 1. Owner of: `out_dir/batch.safetensors` and `out_dir/manifest.json`, with expert replay also
`out_dir/replay.safetensors` and `out_dir/replay.json`, all complete and fsynced, the folder too, before the answer is
printed. Invariants: SQLite is opened read-only; a body is used only if its sha256 is the row's digest.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec

from artd_schema.codec import UNREADABLE, digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.manifest import Drop

from ..store import fs
from ..store.blobs import place
from ..store.readonly import open_readonly
from .manifest import fill, pack
from .spec import PackError, PackSpec, Source
from .tensors import serialise

TENSORS = "batch.safetensors"
MANIFEST = "manifest.json"
REPLAY = "replay.safetensors"
REPLAY_MANIFEST = "replay.json"


class PackRequest(PackSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """db, blobs_dir, out_dir: absolute paths; out_dir exists or is made; trajectory_ids in the order of the batch."""

    db: str
    blobs_dir: str
    trajectory_ids: list[int]
    out_dir: str


class WrittenFile(msgspec.Struct, frozen=True):
    """sha256 in hex."""

    name: str
    sha256: str
    bytes: int


class PackResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="packed"):
    """What lies in out_dir. fill: share of the rows' positions that hold a token. replay, replay_manifest: the replay
    bundle, None without expert replay; covered: physical tokens that have routes."""

    tensors: WrittenFile
    manifest: WrittenFile
    replay: WrittenFile | None = None
    replay_manifest: WrittenFile | None = None
    rows: int
    fill: float
    logical_tokens: int
    physical_tokens: int
    trainable_tokens: int
    covered: int = 0
    unshared_tokens: int = 0
    drops: int


class PackFailure(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failed"):
    """trajectory: row id, 0 when none is to blame; position: path of the bad field; drops: why nothing was left."""

    error: str
    trajectory: int = 0
    position: str = ""
    drops: tuple[Drop, ...] = ()


def run(request: PackRequest) -> PackResult:
    """Pack and write one batch. Raises PackError, OSError or sqlite3.Error."""
    sources = read_sources(request.db, Path(request.blobs_dir), request.trajectory_ids)
    tensors, manifest, replay = pack(request, sources)
    out = Path(request.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    files = {"tensors": _write(out, TENSORS, serialise(tensors)), "manifest": _write(out, MANIFEST, to_json(manifest))}
    if replay:
        files["replay"] = _write(out, REPLAY, serialise(replay.tensors))
        files["replay_manifest"] = _write(out, REPLAY_MANIFEST, to_json(replay.manifest))
    fs.fsync_dir(out)
    reach("pack.written")
    return PackResult(
        **files,
        rows=manifest.rows,
        fill=fill(manifest),
        logical_tokens=manifest.logical_tokens,
        physical_tokens=manifest.physical_tokens,
        trainable_tokens=manifest.trainable_tokens,
        covered=replay.manifest.covered if replay else 0,
        unshared_tokens=manifest.unshared_tokens,
        drops=len(manifest.drops),
    )


def read_sources(db: str, blobs: Path, ids: list[int]) -> list[Source]:
    """Trajectories in the order of `ids`, each body checked against its row's digest. Raises PackError."""
    query = "SELECT group_id, reward, digest, body, blob FROM trajectory WHERE id = ?"
    with closing(open_readonly(Path(db))) as connection:
        connection.execute("BEGIN")  # one snapshot for all rows
        return [_source(number, connection.execute(query, (number,)).fetchone(), blobs) for number in ids]


def _source(number: int, row: sqlite3.Row | None, blobs: Path) -> Source:
    if row is None:
        raise PackError(f"trajectory {number}: no such row", trajectory=number, position="id")
    group, reward, expected, body, blob = row
    if body is None and blob is None:
        raise PackError(f"trajectory {number}: its payload has expired", trajectory=number, position="body")
    if body is None:
        assert blob is not None
        path = blobs / place(blob)
        try:
            body = path.read_bytes()
        except OSError as error:
            message = f"trajectory {number}: blob {blob}: {error.strerror}"
            raise PackError(message, trajectory=number, position="blob") from error
    found = digest(body)
    if found != expected:
        message = f"trajectory {number}: its body has sha256 {found}, its row says {expected}: the store is damaged"
        raise PackError(message, trajectory=number, position="digest")
    return Source(number, group, reward, expected, body)


def _write(folder: Path, name: str, data: bytes) -> WrittenFile:
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(name, digest(data), len(data))


def main() -> Literal[0, 1]:
    answer: PackResult | PackFailure
    try:
        answer = run(msgspec.json.decode(sys.stdin.buffer.read(), type=PackRequest))
    except PackError as error:
        answer = PackFailure(error=str(error), trajectory=error.trajectory, position=error.position, drops=error.drops)
    except UNREADABLE as error:
        answer = PackFailure(error=f"the request is not a PackRequest: {error}", position="request")
    except (OSError, sqlite3.Error) as error:
        answer = PackFailure(error=f"{type(error).__name__}: {error}")
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    return 0 if isinstance(answer, PackResult) else 1


if __name__ == "__main__":
    sys.exit(main())
