"""Reads locks: the text files from which runtimes are made, one per runtime, device and Python version.

Every line is `name==version`, optionally with `# build` (the package may come as source, so it is installed last). The digest
depends on the pins alone, so an edited comment does not make anybody install again.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from . import paths
from .pythons import to_dotted

_PIN = re.compile(r"([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.!+]+)(\s+#\s*build)?")
_CHECK = re.compile(r"#\s*check:\s*import\s+(.+)")
_FILE = re.compile(r"(?P<stem>[a-z-]+)-(?P<minor>py3\d+)\.txt")

OVERLAY = "megatron-test-overlay"
BASE = "base"


class LockError(Exception):
    """A lock is missing or malformed; the text says which and what to do."""


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    build: bool = False

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Lock:
    stem: str  # "megatron-cpu"
    minor: str  # "py311"
    pins: tuple[Pin, ...]
    checks: tuple[str, ...]

    @property
    def digest(self) -> str:
        lines = sorted(str(pin) for pin in self.pins)
        return hashlib.sha256(("\n".join(lines) + "\n").encode()).hexdigest()[:12]

    @property
    def folder_name(self) -> str:
        return f"{self.stem}-{self.minor}-{self.digest}"

    @property
    def needs_compiler(self) -> bool:
        return any(pin.build for pin in self.pins)

    @property
    def versions(self) -> dict[str, str]:
        return {pin.name: pin.version for pin in self.pins}


def parse(text: str, stem: str, minor: str) -> Lock:
    pins: list[Pin] = []
    checks: tuple[str, ...] = ()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if found := _CHECK.fullmatch(line):
            checks = tuple(module.strip() for module in found[1].split(","))
        if not line or line.startswith("#"):
            continue
        match = _PIN.fullmatch(line)
        if match is None:
            raise LockError(f"{stem}-{minor}.txt line {number}: {line!r} is not an exact pin (name==version)")
        pins.append(Pin(match[1], match[2], match[3] is not None))
    if not pins:
        raise LockError(f"{stem}-{minor}.txt pins nothing")
    return Lock(stem, minor, tuple(pins), checks)


def stem_of(name: str, device: str) -> str:
    """Return a lock's name without its Python: `megatron` and `cpu` give `megatron-cpu`. Test overlay and base have no device."""
    return name if name in (OVERLAY, BASE) else f"{name}-{device}"


def list_shipped(folder: Path = paths.LOCKS) -> list[Lock]:
    locks = []
    for path in sorted(folder.glob("*.txt")):
        if match := _FILE.fullmatch(path.name):
            locks.append(parse(path.read_text(), match["stem"], match["minor"]))
    return locks


def minors(name: str, device: str) -> list[str]:
    """List the Pythons that a runtime has a lock for, such as `py311`."""
    return [lock.minor for lock in list_shipped() if lock.stem == stem_of(name, device)]


def load(name: str, device: str, minor: str, folder: Path = paths.LOCKS) -> Lock:
    stem = stem_of(name, device)
    path = folder / f"{stem}-{minor}.txt"
    if path.is_file():
        return parse(path.read_text(), stem, minor)
    same = [lock.minor for lock in list_shipped(folder) if lock.stem == stem]
    if same:
        known = ", ".join(to_dotted(found) for found in same)
        raise LockError(
            f"no lock for runtime {name} ({device}) on Python {to_dotted(minor)}: this artd ships one for {known}. "
            f"Next: artd runtime install {name} --{device} --python python{to_dotted(same[0])}"
        )
    known = ", ".join(sorted(lock.stem for lock in list_shipped(folder) if lock.stem not in (OVERLAY, BASE)))
    raise LockError(
        f"no lock {stem}-{minor}.txt: this artd ships no {device} runtime of {name} (it ships {known}). "
        f"Next: artd runtime install {name} --cpu, or name your own interpreter in artd.toml (`python`, `pythonpath`)"
    )
