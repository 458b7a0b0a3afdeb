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
    """A base model as it was when its run was created.

    `digest` is the sha256 over (name, sha256) of every file. `vocab_size` is the number of token ids. `routes` is the
    shape of a mixture's routes, None for a dense model. `architecture` is that of `config.json`, "" in runs of older
    versions of artd.
    """

    digest: str
    vocab_size: int
    files: tuple[BaseFile, ...]
    routes: RouteShape | None = None
    architecture: str = ""


prepare(BaseModel)
