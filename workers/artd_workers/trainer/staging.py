"""The files of one checkpoint, on their way to the disk.

Owner of: a staging folder until the daemon commits it. Invariants: every file is durable before `manifest.json` is begun, so a
manifest that can be read tells of a whole folder, even after a power loss; no torch, so that whoever has no tensors
writes the same way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from artd_schema.codec import digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.manifest import CheckpointManifest, FileEntry, WeightEntry, WeightTable

MANIFEST, WEIGHTS = "manifest.json", "weights.json"


class Files:
    """Writes the files of one checkpoint. `finish` makes it complete; until then it has no manifest and counts for nothing."""

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.folder = folder
        self._files: list[FileEntry] = []

    def add(self, name: str, data: bytes) -> None:
        _write(self.folder / name, data)
        self._files.append(FileEntry(name, len(data), digest(data)))

    def json(self, name: str, value: object) -> None:
        self.add(name, to_json(value))

    def weights(self, mode: str, entries: Iterable[WeightEntry]) -> None:
        self.json(WEIGHTS, WeightTable(mode=mode, tensors=tuple(entries)))

    def finish(self, **fields: Any) -> str:
        """Write the manifest from its remaining fields; returns its sha256."""
        data = to_json(CheckpointManifest(files=tuple(sorted(self._files, key=lambda f: f.name)), **fields))
        _sync(self.folder)
        reach("stage.files")
        _write(self.folder / MANIFEST, data)
        _sync(self.folder)
        _sync(self.folder.parent)
        reach("stage.manifest")
        return digest(data)


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """fsync a folder: the names in it are durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
