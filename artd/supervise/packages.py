"""Losses and model families that installed packages bring: found by their entry points, copied beside the workers' code, never imported.

Owns the copies: DATA/code/DIGEST holds one package of the distribution that has the entry point, and nothing that it depends on.
Only who can install a package where the daemon runs can add one; a client names one that is there.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

from artd_schema.packages import LOSSES_GROUP, MODELS_GROUP, PackageCode, RunCode, digest_files, read_tree
from artd_schema.run.families import FAMILIES
from artd_schema.run.losses import LOSSES

from .code import PACKAGES, install_files

log = logging.getLogger(__name__)
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")
MAX_BYTES = 64 << 20
"""Size of a package: a loss or a plan is text."""


class Refused(Exception):
    """What a package offers cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class Group:
    """An entry point group. `noun` names what its packages offer. `own` has the names that artd itself offers. A name
    must match `pattern`, which `rule` describes."""

    name: str
    noun: str
    own: Collection[str]
    pattern: re.Pattern[str]
    rule: str


LOSS = Group(
    LOSSES_GROUP, "loss", LOSSES, re.compile(r"[a-z][a-z0-9_-]{0,63}"), "lower-case letters, digits, '_' and '-'"
)
FAMILY = Group(
    MODELS_GROUP, "model family", FAMILIES, re.compile(r"[A-Za-z]\w{0,127}", re.ASCII),
    "letters, digits and '_', as an entry of `architectures` in config.json has",
)  # fmt: skip


@dataclass(frozen=True)
class Offers:
    """What packages offer in a group. `codes` has what can be used, by name. `refused` says why each other name cannot
    be used."""

    group: Group
    codes: Mapping[str, PackageCode] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def list_names(self) -> str:
        """Return every name that can be used, for a message."""
        brought = (f"{code.kind} ({code.distribution} {code.version})" for code in self.codes.values())
        return ", ".join([*sorted(self.group.own), *brought])

    def missing(self, name: str) -> str:
        """Return what is wrong with a name and what to do, or "" for one that can be used."""
        if name in self.codes or name in self.group.own:
            return ""
        noun = self.group.noun
        why = self.refused.get(name, f"it is no {noun} of artd, and no package installed beside artd offers it")
        return (
            f"{why}. Known: {self.list_names()}. Use one of them; or install a package with an entry point {name!r} in the group "
            f"{self.group.name!r} where artd runs, and start artd again"
        )


@dataclass(frozen=True)
class Packages:
    """What packages bring to this boot."""

    losses: Offers = Offers(LOSS)
    families: Offers = Offers(FAMILY)

    def of_run(self, loss: str, architecture: str) -> RunCode:
        """Return the code of a run with this loss, whose base model has this architecture."""
        return RunCode(self.losses.codes.get(loss), self.families.codes.get(architecture))

    @property
    def digests(self) -> set[str]:
        """Return the names of the copies."""
        return {code.digest for offers in (self.losses, self.families) for code in offers.codes.values()}


NO_PACKAGES = Packages()
"""Where no package brings anything."""


def install_packages(data: Path) -> Packages:
    """Copy every package that offers something to DATA/code/DIGEST. Raises OSError when a copy cannot be written."""
    points = _entry_points()
    return Packages(_install(data, LOSS, points), _install(data, FAMILY, points))


def _install(data: Path, group: Group, every: Iterable[EntryPoint]) -> Offers:
    codes: dict[str, PackageCode] = {}
    refused: dict[str, str] = {}
    for kind, points in _offers(group, every):
        try:
            code, files = describe(group, kind, points)
        except Exception as error:  # another package's metadata and files: none may keep the daemon from starting
            refused[kind] = str(error) or type(error).__name__
            log.warning("%s %r of a package cannot be used: %s", group.noun, kind, refused[kind])
            continue
        install_files(data, files)
        codes[kind] = code
    return Offers(group, codes, refused)


def installed_files(code: PackageCode) -> dict[str, bytes] | None:
    """Read the files of a package that is installed. Returns None where it has other files."""
    every = _entry_points()
    for group in (LOSS, FAMILY):
        for kind, points in _offers(group, every):
            if kind != code.kind:
                continue
            try:
                found, files = describe(group, kind, points)
            except Exception:  # as in _install
                continue
            if found.digest == code.digest:
                return files
    return None


def _offers(group: Group, every: Iterable[EntryPoint]) -> Iterator[tuple[str, list[EntryPoint]]]:
    by_kind: dict[str, list[EntryPoint]] = {}
    for point in every:
        if point.group == group.name:
            by_kind.setdefault(point.name, []).append(point)
    return iter(sorted(by_kind.items()))


def _entry_points() -> list[EntryPoint]:
    """Return the entry points of every package. `importlib.metadata.entry_points` raises for all when one has a malformed file."""
    by_name: dict[str, list[EntryPoint]] = {}
    for distribution in distributions():
        try:
            name = _name(distribution)
            if name not in by_name:
                by_name[name] = list(distribution.entry_points)
        except Exception as error:  # another package's metadata
            log.warning("the entry points of %s cannot be read: %s; install it again", _place(distribution), error)
    return [point for points in by_name.values() for point in points]


def _name(distribution: Distribution) -> str:
    """Return the normalised name; the first distribution of a name on the path counts. Raises Refused."""
    name = distribution.metadata["Name"]
    if not isinstance(name, str):
        raise Refused("it has no name")
    return re.sub(r"[-_.]+", "-", name).lower()


def _place(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", distribution))


def describe(group: Group, kind: str, points: list[EntryPoint]) -> tuple[PackageCode, dict[str, bytes]]:
    """Describe an offer by its entry points, and read its package's files. Raises Refused, OSError."""
    names = sorted({point.dist.name if point.dist else "?" for point in points})
    if kind in group.own:
        raise Refused(f"{names[0]} offers it under a name that artd itself has; give it another name")
    if len(points) > 1:
        raise Refused(f"several packages offer it ({', '.join(names)}): uninstall all but one")
    (point,) = points
    if not group.pattern.fullmatch(kind) or not _TARGET.fullmatch(point.value) or point.dist is None:
        raise Refused(
            f"{names[0]} offers it as {point.value!r}: a name has {group.rule}, and its value is package.module:function"
        )
    if not isinstance(point.dist.version, str):
        raise Refused(f"{names[0]} has no version: install it again")
    files = _read(point.value.partition(":")[0].partition(".")[0], names[0])
    return PackageCode(
        kind=kind, target=point.value, distribution=point.dist.name, version=point.dist.version, digest=digest_files(files)
    ), files  # fmt: skip


def _read(package: str, distribution: str) -> dict[str, bytes]:
    """Read the files of a top-level package or module, by name. Raises Refused, OSError."""
    # For a name without a dot `find_spec` imports nothing.
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
            f"{package!r} of {distribution} has {size >> 20} MiB, more than {MAX_BYTES >> 20}: give its code a package of its own"
        )
    return read_tree(origin.parent, package) if whole else {origin.name: origin.read_bytes()}
