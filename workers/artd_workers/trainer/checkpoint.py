"""A checkpoint folder: written once, complete and fsynced before its manifest, read back bit for bit.

Purpose: the durable form of a step: adapter or every weight, optimizer, RNG, data position, the table of weights as served,
canary.
Owner of: a staging folder until the daemon commits it. Invariants: safetensors and JSON only (no pickle); `manifest.json` is
written last; nothing of a folder is used whose sha256 is not the manifest's.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors.torch import load, save
from torch import Tensor

from artd_schema.codec import digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.manifest import CheckpointManifest, FileEntry, WeightEntry, WeightTable
from artd_schema.worker import CheckpointRef

MANIFEST, WEIGHTS, STATE = "manifest.json", "weights.json", "state.json"
ADAPTER, ADAPTER_CONFIG, OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
MODEL = "model.safetensors"


class CheckpointError(ValueError):
    """A committed folder is not what was committed; trying again cannot help."""


class State(Struct, frozen=True, kw_only=True):
    """`state.json`. rng: base64 of torch's CPU generator state; batches, trained_tokens: consumed since step 0."""

    step: int
    rng: str
    batches: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class Loaded:
    """A committed checkpoint in memory: adapter in PEFT names or weights in Hugging Face names, optimizer tensors by name."""

    manifest: CheckpointManifest
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: State


def rng_state() -> str:
    return base64.b64encode(bytes(torch.get_rng_state().numpy())).decode()


def set_rng_state(state: str) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def entry_of(name: str, tensor: Tensor) -> WeightEntry:
    """Table entry of a contiguous CPU tensor; sha256 of its bytes."""
    raw = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return WeightEntry(
        name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()
    )


class Staging:
    """Writes the files of one checkpoint. `finish` makes it complete; until then it has no manifest and counts for nothing."""

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.folder = folder
        self._files: list[FileEntry] = []

    def tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file; the same tensors give the same bytes."""
        self._add(name, save({key: value.detach().contiguous() for key, value in tensors.items()}, {"format": "pt"}))

    def json(self, name: str, value: object) -> None:
        self._add(name, to_json(value))

    def weights(self, mode: str, entries: Iterable[WeightEntry]) -> None:
        self.json(WEIGHTS, WeightTable(mode=mode, tensors=tuple(entries)))

    def _add(self, name: str, data: bytes) -> None:
        _write(self.folder / name, data)
        self._files.append(FileEntry(name, len(data), digest(data)))

    def finish(self, **fields: Any) -> str:
        """Write the manifest from its remaining fields; returns its sha256."""
        data = to_json(CheckpointManifest(files=tuple(sorted(self._files, key=lambda f: f.name)), **fields))
        sync_folder(self.folder)
        reach("stage.files")
        _write(self.folder / MANIFEST, data)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        reach("stage.manifest")
        return digest(data)


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """fsync a folder: the names in it are durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(ref: CheckpointRef, weights: str) -> Loaded:
    """Read a committed checkpoint. weights: the file with what is trained, ADAPTER or MODEL.

    Raises CheckpointError when a file is missing or not the one committed.
    """
    folder = Path(ref.dir)
    raw = _read(folder / MANIFEST, ref.sha)
    try:
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
        shas = {entry.name: entry.sha256 for entry in manifest.files}
        return Loaded(
            manifest,
            load(_read(folder / weights, shas[weights])),
            load(_read(folder / OPTIMIZER, shas[OPTIMIZER])),
            msgspec.json.decode(_read(folder / STATE, shas[STATE]), type=State),
        )
    except (msgspec.DecodeError, KeyError) as error:
        raise CheckpointError(f"{folder} is not a trainer's checkpoint: {error!r}") from None


def _read(path: Path, sha: str) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is damaged, restore it from a backup") from None
    if digest(data) != sha:
        raise CheckpointError(
            f"{path} has sha256 {digest(data)[:16]}, committed was {sha[:16]}: restore it from a backup"
        )
    return data
