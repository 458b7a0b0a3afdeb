"""Reads a committed checkpoint folder for the engine: manifest, weight table, canary, adapter or every weight.

Every file is tied by its hash to the manifest that the daemon committed, so nothing else is ever pushed. There is no torch,
because the harness imports this; safetensors files are read by their plain header.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from artd_schema.codec import UNREADABLE
from artd_schema.data.manifest import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    CheckpointManifest,
    WeightEntry,
    WeightTable,
)
from artd_schema.wire.worker import CheckpointRef

from .adapter import EngineError

_CHUNK = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose manifest has the committed sha256, and whose weight table has the sha256 that the
    manifest names."""

    folder: Path
    manifest: CheckpointManifest
    weights: WeightTable


def read(ref: CheckpointRef) -> Checkpoint:
    """Open a committed checkpoint. Raises EngineError when a file is missing, unreadable or not what was committed."""
    folder = Path(ref.dir)
    raw = _bytes(folder / MANIFEST_FILE)
    if (found := hashlib.sha256(raw).hexdigest()) != ref.sha:
        raise EngineError(
            f"{folder / MANIFEST_FILE} has sha256 {found[:16]}, but {ref.run}@{ref.step} was committed as {ref.sha[:16]}"
        )
    manifest = _decode(raw, CheckpointManifest, folder / MANIFEST_FILE)
    entry = next((file for file in manifest.files if file.name == WEIGHTS_FILE), None)
    if entry is None:
        raise EngineError(
            f"{folder / MANIFEST_FILE} lists no {WEIGHTS_FILE}, so there is nothing to verify a push against"
        )
    raw = _bytes(folder / WEIGHTS_FILE)
    if hashlib.sha256(raw).hexdigest() != entry.sha256:
        raise EngineError(f"{folder / WEIGHTS_FILE} is not the file that was committed; the checkpoint is damaged")
    return Checkpoint(folder, manifest, _decode(raw, WeightTable, folder / WEIGHTS_FILE))


def adopt_adapter(checkpoint: Checkpoint, target: Path) -> None:
    """Give the engine its own copy of the adapter, by hard links where possible, and verify every tensor.

    The engine may read the files again as long as it serves the adapter, so its copy must not depend on how long the daemon
    keeps the checkpoint. Raises EngineError when the adapter is not the one of the weight table, or its config (rank and scale)
    is not the manifest's.
    """
    target.mkdir(parents=True)
    for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
        _link(checkpoint.folder / name, target / name)
    if hashlib.sha256(_bytes(target / ADAPTER_CONFIG_FILE)).hexdigest() != _find_sha(checkpoint, ADAPTER_CONFIG_FILE):
        raise EngineError(f"{checkpoint.folder / ADAPTER_CONFIG_FILE} is not the file that was committed")
    verify_file(target / ADAPTER_FILE, checkpoint.weights.tensors)


def verify_file(path: Path, table: tuple[WeightEntry, ...]) -> None:
    """Compare every tensor of a safetensors file with a weight table: same names, same bytes. Raises EngineError."""
    expected = {entry.name: entry.sha256 for entry in table}
    found = dict(tensor_hashes(path))
    if odd := sorted(expected.keys() ^ found.keys()):
        raise EngineError(f"{path} and its weight table differ in {len(odd)} names, the first is {odd[0]}")
    if wrong := sorted(name for name, sha in found.items() if expected[name] != sha):
        raise EngineError(f"{path}: {len(wrong)} tensors are not those committed, the first is {wrong[0]}")


def tensor_hashes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, sha256 of the raw bytes in hex) of every tensor of a safetensors file. Raises EngineError."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            for name, info in header.items():
                if name != "__metadata__":
                    start, end = info["data_offsets"]
                    file.seek(8 + size + start)
                    yield name, _hash(file, end - start)
    except (OSError, OverflowError, MemoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path} cannot be read as safetensors: {type(error).__name__}: {error}") from None


def _hash(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    while size > 0:
        block = file.read(min(size, _CHUNK))
        if not block:
            raise ValueError("the file ends inside a tensor")
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def _find_sha(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the sha256 of a file in the manifest, None when it is not there."""
    return next((file.sha256 for file in checkpoint.manifest.files if file.name == name), None)


def _link(source: Path, target: Path) -> None:
    try:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, target)
    except OSError as error:
        raise EngineError(f"the adapter file {source} cannot be copied: {error}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}; the checkpoint is missing or damaged") from None


def _decode(raw: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:
        raise EngineError(f"{path} is not what this version of artd writes: {error}") from None
