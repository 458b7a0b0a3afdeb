"""A run's base model as it was pinned: every file of its folder, and what the daemon reads of its `config.json`."""

from __future__ import annotations

from msgspec import Struct

from artd_schema.codec import prepare

from .trajectory import RouteShape


class BaseFile(Struct, frozen=True):
    """One file of the folder; sha256 in hex, mtime in nanoseconds."""

    name: str
    bytes: int
    sha256: str
    mtime_ns: int
    inode: int


class BaseModel(Struct, frozen=True):
    """digest: sha256 over (name, sha256) of every file; vocab_size: ids that a token may have; routes: of a mixture of
    experts; architecture: of `config.json`, "" in a run of an artd that did not note it."""

    digest: str
    vocab_size: int
    files: tuple[BaseFile, ...]
    routes: RouteShape | None = None
    architecture: str = ""


prepare(BaseModel)
