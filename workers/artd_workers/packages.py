"""Imports what a package brings, from the copy that the daemon made of it and from nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artd_schema.packages import PackageCode, digest_files, read_tree


class PackageError(ValueError):
    """A package's code cannot be used. Another try gives the same."""


def load(code: PackageCode) -> Callable[..., Any]:
    """Import the function that a package offers. Raises PackageError, before any line of a file runs that is not in an intact copy."""
    module, _, name = code.target.partition(":")
    _check_copy(code, module.partition(".")[0])
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"{name} is not a function")
    except Exception as error:  # a package's own code: whatever it raises
        raise PackageError(
            f"{_describe(code)} cannot be imported: {type(error).__name__}: {error}; mend the package, install it and start artd again"
        ) from error
    return function


def _check_copy(code: PackageCode, top: str) -> None:
    """Check that Python would import `top` from the copy, and that the copy's files have its digest. Raises PackageError."""
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.origin:
        raise PackageError(f"{_describe(code)}: its copy {code.digest} is not on the path; start artd again")
    place = Path(spec.origin)
    copy = next((folder for folder in place.parents if folder.name == code.digest), None)
    if copy is None:
        raise PackageError(
            f"{_describe(code)}: {top} would be imported from {place}, not from the copy {code.digest}: a package of the trainer's "
            "runtime has the same name; rename yours"
        )
    if (found := digest_files(read_tree(copy))) != code.digest:
        raise PackageError(
            f"{_describe(code)}: {copy} is damaged: its files have the digest {found}; start artd again, which makes it anew"
        )


def _describe(code: PackageCode) -> str:
    return f"{code.kind!r}: {code.target} of {code.distribution} {code.version}"
