"""Base models: a local Hugging Face folder, looked at without torch, and pinned by the sha256 of every file.

Owner of: nothing. Invariants: a run trains one base for ever; every start compares size, mtime and inode with the
pinned manifest and hashes again where they differ.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from artd_schema.codec import UNREADABLE, digest, prepare, to_json
from artd_schema.families import FAMILIES, SEEDED, sparse_layers
from artd_schema.trajectory import RouteShape

from .errors import Conflict, Invalid

MOST_EXPERTS = 1 << 16
"""Of a layer: ids of experts are stored in at most two bytes."""


class BaseFile(Struct, frozen=True):
    """One file of the folder; sha256 in hex, mtime in nanoseconds."""

    name: str
    bytes: int
    sha256: str
    mtime_ns: int
    inode: int


class BaseModel(Struct, frozen=True):
    """digest: sha256 over (name, sha256) of every file; vocab_size: ids that a token may have; routes: of a mixture of
    experts."""

    digest: str
    vocab_size: int
    files: tuple[BaseFile, ...]
    routes: RouteShape | None = None


class ModelConfig(Struct, frozen=True):
    """What the daemon reads of `config.json`."""

    vocab_size: Annotated[int, Meta(ge=1)]
    architectures: tuple[str, ...] | None = None
    num_hidden_layers: int = 0
    num_experts: int = 0
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    decoder_sparse_step: Annotated[int, Meta(ge=1)] = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def routes(self) -> RouteShape | None:
        """What expert ids look like, None for a dense model. (transformers 5 writes `num_experts` as
        `num_local_experts`.)"""
        experts = self.num_experts or self.num_local_experts
        sparse = sum(
            sparse_layers(self.num_hidden_layers, experts, self.decoder_sparse_step, self.mlp_only_layers or ())
        )
        if not sparse:
            return None
        return RouteShape(layers=sparse, topk=self.num_experts_per_tok, experts=experts)


def pin(folder: str) -> BaseModel:
    """Check a model folder and hash it (about a second per GB). Errors: Invalid, naming what is wrong with `model`."""
    path = Path(folder)
    config = read_config(path)
    try:
        files = tuple(_entry(path / name) for name in sorted(_files(path)))
    except OSError as error:
        raise Invalid(f"{error.filename or path} cannot be read: {error.strerror}", field="spec.model") from None
    return BaseModel(_digest(files), config.vocab_size, files, config.routes())


def read_config(path: Path) -> ModelConfig:
    """`config.json` of a model that artd can train. Errors: Invalid."""
    if not path.is_absolute():
        raise Invalid(
            f"model {str(path)!r} is not an absolute path of a local folder; a model of a hub is downloaded first "
            "(`hf download NAME --local-dir DIR`), and DIR given",
            field="spec.model",
        )
    if not path.is_dir():
        raise Invalid(f"there is no model folder {path}: give a local Hugging Face checkpoint", field="spec.model")
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes(), type=ModelConfig)
    except (OSError, *UNREADABLE) as error:
        raise Invalid(f"{path}/config.json cannot be read: {error}", field="spec.model") from None
    architecture = (config.architectures or ("none",))[0]
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise Invalid(f"{path} has architecture {architecture}; artd trains {known}", field="spec.model")
    _check_routes(path, config.routes())
    if not list(path.glob("*.safetensors")) and not (path / SEEDED).is_file():
        raise Invalid(f"{path} holds no *.safetensors; convert the checkpoint to safetensors first", field="spec.model")
    return config


def _check_routes(path: Path, shape: RouteShape | None) -> None:
    """Errors: Invalid for a number of experts that no router could choose."""
    if shape is not None and not 1 <= shape.topk <= shape.experts <= MOST_EXPERTS:
        raise Invalid(
            f"{path}/config.json: num_experts_per_tok = {shape.topk} of {shape.experts} experts; artd trains 1 to all of at "
            f"most {MOST_EXPERTS}",
            field="spec.model",
        )


def check_pinned(folder: str, pinned: BaseModel) -> None:
    """Errors: Conflict when a file is not what the run was made with, or cannot be read."""
    path = Path(folder)
    for entry in pinned.files:
        file = path / entry.name
        try:
            same = _is_same(file, entry)
        except FileNotFoundError:
            raise Conflict(f"base model {path} lost {entry.name}: put it back, or start another run") from None
        except OSError as error:
            raise Conflict(f"base model file {file} cannot be read ({error.strerror}): make it readable") from None
        if not same:
            raise Conflict(f"base model file {file} changed since the run was created: put the old one back")


def _is_same(file: Path, pinned: BaseFile) -> bool:
    stat = file.stat()
    if (stat.st_size, stat.st_mtime_ns, stat.st_ino) == (pinned.bytes, pinned.mtime_ns, pinned.inode):
        return True
    return _entry(file).sha256 == pinned.sha256


def _files(path: Path) -> list[str]:
    return [p.name for p in path.iterdir() if p.is_file() and not p.name.startswith(".")]


def _entry(path: Path) -> BaseFile:
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    stat = path.stat()
    return BaseFile(path.name, stat.st_size, sha, stat.st_mtime_ns, stat.st_ino)


def _digest(files: tuple[BaseFile, ...]) -> str:
    return digest(to_json([(f.name, f.sha256) for f in files]))


prepare(BaseModel, ModelConfig)
