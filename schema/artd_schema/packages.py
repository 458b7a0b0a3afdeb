"""Code that installed packages bring beside artd's own: losses and model families, and the digest that names a copy of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from .codec import prepare

LOSSES_GROUP = "artd.losses"
"""Entry point group in which a package offers losses: KIND = "package.module:function"."""
MODELS_GROUP = "artd.models"
"""Entry point group in which a package offers model families: ARCHITECTURE = "package.module:plan"."""
DIGITS = 12


class PackageCode(Struct, frozen=True, kw_only=True):
    """A function that a package offers, under the name `kind`.

    `target` is `package.module:function`. `distribution` and `version` are those of the package. `digest` is that of
    its files, and names their copy in DATA/code.
    """

    kind: str
    target: str
    distribution: str
    version: str
    digest: str


class RunCode(Struct, frozen=True):
    """The packages' code that a run uses, as a checkpoint's manifest also names it; None where artd's own does."""

    loss: PackageCode | None = None
    family: PackageCode | None = None

    @property
    def used(self) -> list[PackageCode]:
        """The code that comes from packages."""
        return [code for code in (self.loss, self.family) if code is not None]

    def folders(self, copies: Path) -> list[str]:
        """Return the folders for the trainer's PYTHONPATH. `copies` is DATA/code."""
        return sorted({str(copies / code.digest) for code in self.used})


def read_tree(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """Return the contents of every source file below `folder` by relative POSIX name, without byte code and hidden files."""
    files: dict[str, bytes] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or name.endswith((".pyc", ".pyo")):
                continue
            path = Path(parent, name)
            files[Path(prefix, path.relative_to(folder)).as_posix()] = path.read_bytes()
    return files


def digest_files(files: Mapping[str, bytes]) -> str:
    """Return 12 hex digits of sha256 over every (name, length, content), in order of name."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{len(files[name])}\0".encode())
        total.update(files[name])
    return total.hexdigest()[:DIGITS]


prepare(RunCode)
