"""`python -m artd.packing.child`: packs one batch; exec'ed by the daemon for each batch.

Request: one JSON object on stdin (`PackRequest`). Answer: one JSON line on stdout, `PackResult` with exit 0, or
`PackFailure` with exit 1. Owner of: `out_dir/batch.safetensors` and `out_dir/manifest.json`, with expert replay also
`out_dir/replay.safetensors` and `out_dir/replay.json`, all complete and fsynced, the folder too, before the answer is
printed. Invariants: SQLite is opened read-only; a body is used only if its sha256 is the row's digest; what could not be read
is never told as a fault of the data.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec

from artd.store import fs
from artd.store.blobs import place
from artd.store.readonly import open_readonly
from artd_schema.codec import UNREADABLE, digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.data.manifest import Drop

from .batch import fill, pack
from .inputs import PackError, PackSpec, Source, StoreDamaged
from .tensors import serialise

TENSORS = "batch.safetensors"
MANIFEST = "manifest.json"
REPLAY = "replay.safetensors"
REPLAY_MANIFEST = "replay.json"
READ_AGAIN_S = (0.3, 1.0)
"""Pauses before bytes that are not what was acknowledged are read a second and a third time."""


class PackRequest(PackSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """db, blobs_dir, out_dir: absolute paths; out_dir exists or is made; trajectory_ids in the order of the batch."""

    db: str
    blobs_dir: str
    trajectory_ids: list[int]
    out_dir: str


class _Extra(msgspec.Struct):
    """metrics: one that is not finite is null in JSON."""

    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)


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
    """trajectory: row id, 0 when none is to blame; position: path of the bad field; drops: why nothing was left.

    kind: `data`: the trajectory, or every one, can never be packed; `damaged`: the stored bytes of the trajectory are not those
    that were acknowledged; `code`: the packing code itself ended in an exception; `io`: something could not be read, written
    or started; `stalled`: the child was ended.
    """

    error: str
    kind: Literal["data", "damaged", "code", "io", "stalled"] = "io"
    trajectory: int = 0
    position: str = ""
    drops: tuple[Drop, ...] = ()


def run(request: PackRequest) -> PackResult:
    """Pack and write one batch. Raises PackError, StoreDamaged, OSError or sqlite3.Error."""
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
    """Trajectories in the order of `ids`, each body checked against its row's digest. Raises StoreDamaged, OSError,
    sqlite3.Error."""
    with closing(open_readonly(Path(db))) as connection:
        connection.execute("BEGIN")  # one snapshot for all rows
        return [_source(connection, number, blobs) for number in ids]


QUERY = (
    "SELECT t.group_id, t.reward, t.digest, d.metrics, d.body, t.blob FROM trajectory t"
    " LEFT JOIN trajectory_data d ON d.trajectory_id = t.id WHERE t.id = ?"
)


def _source(connection: sqlite3.Connection, number: int, blobs: Path) -> Source:
    row = connection.execute(QUERY, (number,)).fetchone()
    if row is None:
        raise StoreDamaged(f"trajectory {number}: no such row", number)
    group, reward, expected, extra, _, blob = row
    for pause_s in (*READ_AGAIN_S, None):
        body, where = _read(connection, number, blobs)
        found = digest(body)
        if found == expected:
            return Source(number, group, reward, expected, body, _client_metrics(extra))
        if pause_s is not None:  # a bit may have been flipped on its way from the disk
            _forget_pages(blobs, blob)
            time.sleep(pause_s)
    raise StoreDamaged(f"trajectory {number}: {where} has sha256 {found}, its row says {expected}", number)


def _read(connection: sqlite3.Connection, number: int, blobs: Path) -> tuple[bytes, str]:
    """(body, where it lies)."""
    body, blob = connection.execute(QUERY, (number,)).fetchone()[4:]
    if body is not None:
        return body, "its body in the database"
    if blob is None:
        raise StoreDamaged(f"trajectory {number}: its payload has expired", number)
    path = blobs / place(blob)
    return path.read_bytes(), f"the file {path}"


def _forget_pages(blobs: Path, blob: str | None) -> None:
    """Let the next read come from the disk."""
    if blob is not None:
        fd = os.open(blobs / place(blob), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _client_metrics(extra: bytes) -> dict[str, float]:
    """Of the JSON {metrics, metadata} beside a body. What cannot be read is missing in the step's means, and stops no training."""
    try:
        found = msgspec.json.decode(extra, type=_Extra).metrics
    except UNREADABLE:
        return {}
    return {name: value for name, value in found.items() if value is not None}


def _write(folder: Path, name: str, data: bytes) -> WrittenFile:
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(name, digest(data), len(data))


def attempt(request: PackRequest) -> PackResult | PackFailure:
    """`run`, with whatever goes wrong as its answer."""
    try:
        return run(request)
    except PackError as error:
        return PackFailure(
            error=str(error), kind="data", trajectory=error.trajectory, position=error.position, drops=error.drops
        )
    except StoreDamaged as error:
        return PackFailure(error=str(error), kind="damaged", trajectory=error.trajectory)
    except (OSError, sqlite3.Error, MemoryError) as error:
        return PackFailure(error=f"{type(error).__name__}: {error}")
    except Exception as error:
        return PackFailure(error=_told(error), kind="code")


def main() -> Literal[0, 1]:
    answer: PackResult | PackFailure
    try:
        answer = attempt(msgspec.json.decode(sys.stdin.buffer.read(), type=PackRequest))
    except UNREADABLE as error:
        answer = PackFailure(error=f"the request is not a PackRequest: {error}", position="request")
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    return 0 if isinstance(answer, PackResult) else 1


def _told(error: Exception) -> str:
    """An exception that nobody foresaw, and where it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    sys.exit(main())
