"""The journal of a client: what it saw and was promised, written down outside artd, in one file of JSON lines.

A line is durable before its writer goes on, so the journal of a killed client is complete. A line that a kill cut short is not
a promise, and is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct


class Meant(Struct, frozen=True, kw_only=True, tag=True):
    """A trajectory is about to be submitted. digest: sha256 of its body, "" by reference; refs: response ids."""

    key: str
    group: str
    reward: float
    digest: str = ""
    refs: tuple[str, ...] = ()


class Acked(Struct, frozen=True, kw_only=True, tag=True):
    """The daemon said that it has the trajectory of this key. at: seconds since the epoch."""

    key: str
    trajectory: int
    at: float


class Replied(Struct, frozen=True, kw_only=True, tag=True):
    """The gateway answered. model: RUN@STEP as told; prompt, tokens: ids; verified: whether the engine had by then said of
    every one of these weights that they are live (None: the engine does not sign)."""

    response: str
    model: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    verified: bool | None
    at: float


class Broken(Struct, frozen=True, kw_only=True, tag=True):
    """A promise was broken before the client's eyes."""

    what: str


Line = Meant | Acked | Replied | Broken
_decode = msgspec.json.Decoder(Line).decode


class Journal:
    """Appends to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._fd, sum(len(line) + 1 for line in _whole(path)))

    def write(self, line: Line) -> None:
        os.write(self._fd, msgspec.json.encode(line) + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path) -> Iterator[Line]:
    """Every whole line, oldest first."""
    for line in _whole(path):
        yield _decode(line)


def tail(path: Path, size: int = 4096) -> list[Line]:
    """The newest whole lines of the last `size` bytes."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        cut = file.seek(max(0, path.stat().st_size - size)) > 0
        lines = file.read().split(b"\n")
    return [_decode(line) for line in lines[cut:-1]]


def _whole(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
