"""Packs one batch in a process of its own: `python -m artd.packing.child`, which the daemon executes for each batch.

The request is one JSON object on stdin (`PackRequest`). The answer is one JSON line on stdout: `PackResult` with exit
status 0, or `PackFailure` with exit status 1. Owns `out_dir/batch.safetensors` and `out_dir/manifest.json`, with expert
replay also `out_dir/replay.safetensors` and `out_dir/replay.json`. These files and their folder are complete and
fsynced before the answer is printed. SQLite is opened read-only. A body is used only if its sha256 is the row's digest.
A failed read is never reported as a fault of the data.
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
"""Pauses before a body with the wrong digest is read a second and a third time."""


class PackRequest(PackSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to pack. The paths are absolute; `out_dir` is created if it does not exist; `trajectory_ids` has the order
    of the batch."""

    db: str
    blobs_dir: str
    trajectory_ids: list[int]
    out_dir: str


class _Extra(msgspec.Struct):
    """The part of `trajectory_data.metrics` that is measured. A metric that is not finite is null in JSON."""

    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)


class WrittenFile(msgspec.Struct, frozen=True):
    """One file of the result. `sha256` is in hex."""

    name: str
    sha256: str
    bytes: int


class PackResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="packed"):
    """The files in `out_dir` and their measures.

    `fill` is the share of the rows' positions that hold a token. `replay` and `replay_manifest` are the replay bundle,
    None without expert replay. `covered` counts the physical tokens that have routes.
    """

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
    """Why there is no batch. `trajectory` is the row id of the guilty one, 0 for none; `position` is the path of the
    bad field; `drops` says why nothing was left.

    `kind` is one of:

    - `data`: this trajectory (all of them if `trajectory` is 0) can never be packed.
    - `damaged`: the stored bytes of the trajectory are not those that were acknowledged.
    - `code`: the packing code itself ended in an exception.
    - `io`: something could not be read, written or started.
    - `stalled`: the daemon killed the child.
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
    """Return the trajectories in the order of `ids`, after checking each body against its row's digest. Raises
    StoreDamaged, OSError, sqlite3.Error."""
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
        if pause_s is not None:  # a bit may have flipped between disk and memory
            _forget_pages(blobs, blob)
            time.sleep(pause_s)
    raise StoreDamaged(f"trajectory {number}: {where} has sha256 {found}, its row says {expected}", number)


def _read(connection: sqlite3.Connection, number: int, blobs: Path) -> tuple[bytes, str]:
    """Return the body, and a description of its place."""
    body, blob = connection.execute(QUERY, (number,)).fetchone()[4:]
    if body is not None:
        return body, "its body in the database"
    if blob is None:
        raise StoreDamaged(f"trajectory {number}: its payload has expired", number)
    path = blobs / place(blob)
    return path.read_bytes(), f"the file {path}"


def _forget_pages(blobs: Path, blob: str | None) -> None:
    """Drop the file's cached pages, so that the next read comes from the disk."""
    if blob is not None:
        fd = os.open(blobs / place(blob), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _client_metrics(extra: bytes) -> dict[str, float]:
    """Return the metrics from the JSON {metrics, metadata} beside a body. Metrics that cannot be read are missing in
    the step's means; they do not stop the training."""
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
    """Call `run`, and return whatever goes wrong as a PackFailure."""
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
        return PackFailure(error=_describe_crash(error), kind="code")


def main() -> Literal[0, 1]:
    answer: PackResult | PackFailure
    try:
        answer = attempt(msgspec.json.decode(sys.stdin.buffer.read(), type=PackRequest))
    except UNREADABLE as error:
        answer = PackFailure(error=f"the request is not a PackRequest: {error}", position="request")
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    return 0 if isinstance(answer, PackResult) else 1


def _describe_crash(error: Exception) -> str:
    """Describe an unexpected exception and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    sys.exit(main())
