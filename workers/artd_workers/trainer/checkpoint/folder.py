"""A checkpoint folder: what it contains, and how it is read back bit for bit.

It is the durable form of a step: adapter or every weight, optimizer, RNG, data position, the table of served weights, and the
canary. `writer` writes it, every file before the manifest. It has safetensors and JSON only, no pickle. A file whose sha256 is
not the manifest's is never used.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from msgspec import UNSET, Struct, UnsetType
from torch import Tensor

from artd_schema.codec import UNREADABLE
from artd_schema.data.manifest import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    CheckpointManifest,
    WeightEntry,
)
from artd_schema.wire.worker import CheckpointRef
from artd_workers.transfer.checksum import sum_of

from . import tensor_file
from .writer import Files

SUFFIX = ".safetensors"
STATE = "state.json"
SHARD = 1 << 30
"""Bytes of one file of moments. Several files are hashed, written and read in parallel; a single one keeps one core busy."""
READERS = 8


class CheckpointError(ValueError):
    """A committed folder is not what was committed; trying again cannot help."""


class State(Struct, frozen=True, kw_only=True):
    """The content of `state.json`.

    `rng`: base64 of the state of torch's CPU generator; `cuda_rng`: of the GPU's, unset without a GPU. `batches`,
    `trained_tokens`: consumed since step 0.
    """

    step: int
    rng: str = ""
    cuda_rng: str | UnsetType = UNSET
    batches: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class Loaded:
    """A committed checkpoint in memory: an adapter by PEFT names or weights by Hugging Face names, and the optimizer's tensors
    by name."""

    manifest: CheckpointManifest
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: State


def with_rng(state: State, cuda: bool) -> State:
    """Return the state with the present states of the generators. `cuda`: the GPU's too."""
    gpu = _text(torch.cuda.get_rng_state()) if cuda else UNSET
    return msgspec.structs.replace(state, rng=_text(torch.get_rng_state()), cuda_rng=gpu)


def set_rng_state(state: State, cuda: bool) -> None:
    """Restore the generators from `with_rng`. A checkpoint that was trained without a GPU has no state of its generator."""
    torch.set_rng_state(_bytes(state.rng))
    if cuda and state.cuda_rng is not UNSET:
        torch.cuda.set_rng_state(_bytes(state.cuda_rng))


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def entry_of(name: str, tensor: Tensor) -> WeightEntry:
    """Return the table entry of a contiguous CPU tensor, with the sha256 of its bytes."""
    raw = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return WeightEntry(
        name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()
    )


def is_listed(tensor: Tensor, entry: WeightEntry) -> bool:
    """Return whether a contiguous CPU tensor has the bytes that an entry of a weight table lists."""
    return (sum_of(tensor) if entry.sum64 is not None else entry_of(entry.name, tensor).sha256) == entry.known


class Staging(Files):
    """`Files` that also takes tensors."""

    def tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file; the same tensors give the same bytes.

        The tensors must not change before `finish` returns; `finish` also raises any error of this write.
        """
        self.stream(name, tensor_file.chunks(tensors))

    def add_shards(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors as `tensors` does, in files of about `SHARD` bytes; see `shards_of`."""
        for file, part in shards(name, tensors).items():
            self.tensors(file, part)


def shards(name: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Divide tensors into files of about `SHARD` bytes, sorted by their names. Returns {file: tensors}."""
    cut: list[dict[str, Tensor]] = [{}]
    room = SHARD
    for key in sorted(tensors):
        if cut[-1] and tensors[key].nbytes > room:
            cut.append({})
            room = SHARD
        cut[-1][key] = tensors[key]
        room -= tensors[key].nbytes
    return dict(zip(_shard_names(name, len(cut)), cut, strict=True))


def _shard_names(name: str, count: int) -> list[str]:
    """Return `name` itself for one file, else names like those that Hugging Face gives the parts of a model."""
    stem = name.removesuffix(SUFFIX)
    return [f"{stem}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)] if count > 1 else [name]


def shards_of(name: str, files: Iterable[str]) -> list[str]:
    """Return the files of a checkpoint that `Staging.add_shards` wrote under this name. Raises KeyError when there is none."""
    part = re.compile(rf"{re.escape(name.removesuffix(SUFFIX))}-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}")
    found = sorted(file for file in files if file == name or part.fullmatch(file))
    if not found:
        raise KeyError(name)
    return found


def read(ref: CheckpointRef, weights: str) -> Loaded:
    """Read a committed checkpoint. `weights`: the file with what is trained, ADAPTER_FILE or MODEL_FILE.

    Raises CheckpointError when a file is missing or not the one committed.
    """
    folder = Path(ref.dir)
    raw = _read(folder / MANIFEST_FILE, ref.sha)
    try:
        manifest = msgspec.json.decode(raw.data, type=CheckpointManifest)
        shas = {entry.name: entry.sha256 for entry in manifest.files}
        names = (weights, STATE, *shards_of(OPTIMIZER_FILE, shas))
        with ThreadPoolExecutor(READERS) as pool:
            trained, state, *moments = pool.map(lambda name: _read(folder / name, shas[name]), names)
        if weights == ADAPTER_FILE:
            _read(folder / ADAPTER_CONFIG_FILE, shas[ADAPTER_CONFIG_FILE])  # the adapter's rank and scale
        return Loaded(
            manifest,
            tensor_file.parse(trained),
            {key: tensor for file in moments for key, tensor in tensor_file.parse(file).items()},
            msgspec.json.decode(state.data, type=State),
        )
    except CheckpointError:
        raise
    except (*UNREADABLE, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a trainer's checkpoint: {error!r}") from None


def _read(path: Path, sha: str) -> tensor_file.Bytes:
    try:
        data, found = tensor_file.read(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is damaged, restore it from a backup") from None
    if found != sha:
        raise CheckpointError(f"{path} has sha256 {found[:16]}, committed was {sha[:16]}: restore it from a backup")
    return data
