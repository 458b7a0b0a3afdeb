"""Losses that installed packages bring: found by their entry points, copied beside the workers' code, never imported.

Owns the copies: DATA/code/DIGEST holds one package of the distribution that has the entry point, and nothing that it depends on.
Only who can install a package where the daemon runs can add a loss; a client names one that is there.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from artd_schema.losses import GROUP, LOSSES, LossCode
from artd_schema.spec import LossSpec

from .code import PACKAGES, digest_files, install_files, read_tree

_KIND = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")
MAX_BYTES = 64 << 20
"""Size of a package: a loss is text."""


class Refused(Exception):
    """A package's loss cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class Losses:
    """What a run of this boot can be trained with beside artd's own losses. root: folder of the copies; refused: kind -> why."""

    root: Path = Path()
    codes: Mapping[str, LossCode] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def folders(self) -> list[str]:
        """For the trainer's PYTHONPATH."""
        return sorted({str(self.root / code.digest) for code in self.codes.values()})

    def error(self, spec: LossSpec) -> tuple[str, str]:
        """(field, why) of a loss that no run can be made with; two empty strings where one can."""
        if spec.kind in self.codes:
            return "", ""
        if spec.kind not in LOSSES:
            known = [*LOSSES, *(f"{c.kind} ({c.distribution} {c.version})" for c in self.codes.values())]
            why = self.refused.get(spec.kind, "it is no loss of artd, and no package installed beside artd offers it")
            return "loss.kind", (
                f"loss.kind={spec.kind!r}: {why}. Known losses: {', '.join(known)}. Use one of them; or install a package with an "
                f"entry point {spec.kind!r} in the group {GROUP!r} where artd runs, and start artd again"
            )
        if extra := sorted((spec.params or {}).keys() - set(LOSSES[spec.kind])):
            has = ", ".join(LOSSES[spec.kind]) or "none"
            return (
                "loss.params",
                f"loss.params: {spec.kind!r} has no parameter {extra[0]!r}; it has: {has}. Leave it out",
            )
        return "", ""


NO_LOSSES = Losses()
"""Of a place where no package brings one."""


def install_losses(data: Path) -> Losses:
    """Copy every package that offers a loss to DATA/code/DIGEST. Raises OSError when a copy cannot be written."""
    codes: dict[str, LossCode] = {}
    refused: dict[str, str] = {}
    for kind, points in _offers():
        try:
            code, files = describe(kind, points)
        except Exception as error:  # another package's metadata and files: none may keep the daemon from starting
            refused[kind] = str(error) or type(error).__name__
            continue
        install_files(data, files)
        codes[kind] = code
    return Losses(data / "code", codes, refused)


def installed_files(code: LossCode) -> dict[str, bytes] | None:
    """Read the files of a loss from the installed package. Returns None where the package has other files."""
    for kind, points in _offers():
        if kind == code.kind:
            try:
                found, files = describe(kind, points)
            except Exception:  # as in install_losses
                return None
            return files if found.digest == code.digest else None
    return None


def _offers() -> Iterator[tuple[str, list[EntryPoint]]]:
    by_kind: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        by_kind.setdefault(point.name, []).append(point)
    return iter(sorted(by_kind.items()))


def describe(kind: str, points: list[EntryPoint]) -> tuple[LossCode, dict[str, bytes]]:
    """Describe a loss by its entry points, and read its package's files. Raises Refused, OSError."""
    names = sorted({point.dist.name if point.dist else "?" for point in points})
    if kind in LOSSES:
        raise Refused(f"{names[0]} offers it under the name of one of artd's own losses; give it another name")
    if len(points) > 1:
        raise Refused(f"several packages offer it ({', '.join(names)}): uninstall all but one")
    (point,) = points
    if not _KIND.fullmatch(kind) or not _TARGET.fullmatch(point.value) or point.dist is None:
        raise Refused(
            f"{names[0]} offers it as {point.value!r}: a name has lower-case letters, digits, '_' and '-', and its value is "
            "package.module:function"
        )
    if not isinstance(point.dist.version, str):
        raise Refused(f"{names[0]} has no version: install it again")
    files = _read(point.value.partition(":")[0].partition(".")[0], names[0])
    return LossCode(
        kind=kind, target=point.value, distribution=point.dist.name, version=point.dist.version, digest=digest_files(files)
    ), files  # fmt: skip


def _read(package: str, distribution: str) -> dict[str, bytes]:
    """Read the files of a top-level package or module, by name. Raises Refused, OSError."""
    # Of a name without a dot nothing is imported.
    found = None if package in PACKAGES else importlib.util.find_spec(package)
    origin = Path(found.origin) if found and found.has_location and found.origin else None
    if origin is None or origin.suffix != ".py":
        raise Refused(
            f"{distribution} offers it in {package!r}, which is neither a module nor a package with an __init__.py of its own"
        )
    whole = origin.name == "__init__.py"
    paths = origin.parent.rglob("*") if whole else (origin,)
    if (size := sum(path.stat().st_size for path in paths if path.is_file())) > MAX_BYTES:
        raise Refused(
            f"{package!r} of {distribution} has {size >> 20} MiB, more than {MAX_BYTES >> 20}: give the loss a package of its own"
        )
    return read_tree(origin.parent, package) if whole else {origin.name: origin.read_bytes()}
