"""Base models: reads a local Hugging Face folder without torch, and pins it by the sha256 of every file.

A run trains one base model for ever. Before each start of a worker, size, mtime and inode of every file are compared with the
pinned manifest; a file that differs is hashed again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from artd.errors import Conflict, Invalid
from artd.supervise.packages import Offers
from artd_schema.codec import UNREADABLE, digest, prepare, to_json
from artd_schema.data.base import BaseFile, BaseModel
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.families import FAMILIES, SEEDED, sparse_layers

MOST_EXPERTS = 1 << 16
"""The most experts of one layer: an expert's id is stored in at most two bytes."""
Stamp = tuple[int, int, int]
"""Size in bytes, mtime in nanoseconds, inode."""


class ModelConfig(Struct, frozen=True):
    """The fields of `config.json` that the daemon reads."""

    vocab_size: Annotated[int, Meta(ge=1)]
    architectures: tuple[str, ...] | None = None
    num_hidden_layers: int = 0
    num_experts: int = 0
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    decoder_sparse_step: Annotated[int, Meta(ge=1)] = 1
    mlp_only_layers: tuple[int, ...] | None = None

    @property
    def architecture(self) -> str:
        return (self.architectures or ("none",))[0]

    def routes(self) -> RouteShape | None:
        """Return the shape of router replay, None for a dense model. transformers 5 writes `num_experts` as
        `num_local_experts`."""
        experts = self.num_experts or self.num_local_experts
        sparse = sum(
            sparse_layers(self.num_hidden_layers, experts, self.decoder_sparse_step, self.mlp_only_layers or ())
        )
        if not sparse:
            return None
        return RouteShape(layers=sparse, topk=self.num_experts_per_tok, experts=experts)


def pin(folder: str) -> BaseModel:
    """Check a model folder and hash its files, about a second per GB. Raises Invalid, which says what is wrong with `model`."""
    path = Path(folder)
    config = read_config(path)
    try:
        files = tuple(_entry(path / name) for name in sorted(_files(path)))
    except OSError as error:
        raise Invalid(f"{error.filename or path} cannot be read: {error.strerror}", field="spec.model") from None
    return BaseModel(_digest(files), config.vocab_size, files, config.routes(), config.architecture)


def read_config(path: Path) -> ModelConfig:
    """Read `config.json` of a model folder whose files artd can read. Raises Invalid."""
    if not path.is_absolute():
        raise Invalid(
            f"model {str(path)!r} is neither the absolute path of a local folder nor a name: ORG/NAME of the Hugging Face Hub is, "
            "and smollm2-135m-instruct",
            field="spec.model",
        )
    if not path.is_dir():
        raise Invalid(
            f"there is no model folder {path}: give a Hugging Face checkpoint, ORG/NAME of the Hub, or smollm2-135m-instruct",
            field="spec.model",
        )
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes(), type=ModelConfig)
    except (OSError, *UNREADABLE) as error:
        raise Invalid(f"{path}/config.json cannot be read: {error}", field="spec.model") from None
    _check_routes(path, config.routes())
    stored, drawn = any(path.glob("*.safetensors")), (path / SEEDED).is_file()
    if stored and drawn:
        raise Invalid(
            f"{path} holds both *.safetensors and {SEEDED} (weights that are drawn): remove the one that this model is not made of",
            field="spec.model",
        )
    if not stored and not drawn:
        raise Invalid(f"{path} holds no *.safetensors; convert the checkpoint to safetensors first", field="spec.model")
    return config


def check_family(folder: str, architecture: str, families: Offers) -> None:
    """Raise Invalid for a model of a family that neither artd nor an installed package has."""
    if unknown := families.missing(architecture):
        raise Invalid(f"{folder} has architecture {architecture}: {unknown}", field="spec.model")
    if architecture not in FAMILIES and (Path(folder) / SEEDED).is_file():
        raise Invalid(
            f"{folder} holds {SEEDED}: artd draws weights for its own families, and {architecture} is a package's; give a folder "
            "with *.safetensors",
            field="spec.model",
        )


def _check_routes(path: Path, shape: RouteShape | None) -> None:
    """Raise Invalid for a number of experts that no router could choose."""
    if shape is not None and not 1 <= shape.topk <= shape.experts <= MOST_EXPERTS:
        raise Invalid(
            f"{path}/config.json: num_experts_per_tok = {shape.topk} of {shape.experts} experts; artd trains 1 to all of at "
            f"most {MOST_EXPERTS}",
            field="spec.model",
        )


def check_pinned(folder: str, pinned: BaseModel) -> None:
    """Raise Conflict when a file cannot be read or is not the one that the run was made with."""
    PinnedBase(folder, pinned).check()


class PinnedBase:
    """A run's base model on disk. It remembers what it has hashed, so that a copied or touched file is hashed once."""

    def __init__(self, folder: str, pinned: BaseModel) -> None:
        self._folder = Path(folder)
        self._pinned = pinned
        self._hashed: dict[str, Stamp] = {}

    def check(self) -> None:
        """Compare every file, and hash those that were written or moved, about a second per GB. Raises Conflict."""
        for entry in self._pinned.files:
            stamp = self._stamp(entry)
            if not self._known(entry, stamp):
                if self._read(entry) != entry.sha256:
                    raise self._changed_error(entry)
                self._hashed[entry.name] = stamp

    def look(self) -> None:
        """Check without hashing that no file was written or moved since it was hashed. Raises Conflict."""
        for entry in self._pinned.files:
            if not self._known(entry, self._stamp(entry)):
                raise self._changed_error(entry)

    def _known(self, entry: BaseFile, stamp: Stamp) -> bool:
        return stamp in ((entry.bytes, entry.mtime_ns, entry.inode), self._hashed.get(entry.name))

    def _stamp(self, entry: BaseFile) -> Stamp:
        try:
            stat = (self._folder / entry.name).stat()
        except OSError as error:
            raise self._unreadable_error(entry, error) from None
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def _read(self, entry: BaseFile) -> str:
        try:
            return _entry(self._folder / entry.name).sha256
        except OSError as error:
            raise self._unreadable_error(entry, error) from None

    def _unreadable_error(self, entry: BaseFile, error: OSError) -> Conflict:
        if isinstance(error, FileNotFoundError):
            return Conflict(f"base model {self._folder} lost {entry.name}: put it back, or start another run")
        where = f"base model file {self._folder / entry.name}"
        return Conflict(f"{where} cannot be read ({error.strerror}): make it readable")

    def _changed_error(self, entry: BaseFile) -> Conflict:
        return Conflict(
            f"base model file {self._folder / entry.name} changed since the run was created: put the old one back"
        )


def _files(path: Path) -> list[str]:
    return [p.name for p in path.iterdir() if p.is_file() and not p.name.startswith(".")]


def _entry(path: Path) -> BaseFile:
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    stat = path.stat()
    return BaseFile(path.name, stat.st_size, sha, stat.st_mtime_ns, stat.st_ino)


def _digest(files: tuple[BaseFile, ...]) -> str:
    return digest(to_json([(f.name, f.sha256) for f in files]))


prepare(ModelConfig)
