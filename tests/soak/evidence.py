"""Collects, from outside artd's tables, everything that the history checker looks at: copies of every checkpoint and batch
manifest on disk.

A manifest is read when it is complete (its folder or file then gets its name), and kept by the sha256 of its bytes. Nothing
comes from the database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from artd_schema.codec import digest
from artd_schema.data.manifest import BatchManifest, CheckpointManifest
from tests.fakes.script import Script

from . import history, journal
from .history import SIGNED


class Collector:
    """data: a daemon's data folder; run: name of the run that is watched."""

    def __init__(self, data: Path, run: str) -> None:
        self._folder = data / "checkpoints" / run
        self._blobs = data / "blobs"
        self._known: dict[str, str] = {}
        self.manifests: dict[str, CheckpointManifest] = {}
        self.batches: dict[str, BatchManifest] = {}

    def look(self) -> None:
        """Take what is new. Often enough that nothing is retired in between."""
        for path in self._folder.glob("*/manifest.json"):
            if path.parent.name in self._known:
                continue
            with contextlib.suppress(FileNotFoundError):  # a leftover that was removed just now
                raw = path.read_bytes()
                manifest = msgspec.json.decode(raw, type=CheckpointManifest)
                if manifest.batch and manifest.batch not in self.batches:
                    blob = (self._blobs / manifest.batch[:2] / manifest.batch).read_bytes()
                    assert digest(blob) == manifest.batch, f"batch {manifest.batch} is damaged"
                    self.batches[manifest.batch] = msgspec.json.decode(blob, type=BatchManifest)
                sha = digest(raw)
                self.manifests[sha], self._known[path.parent.name] = manifest, sha

    @property
    def newest(self) -> str:
        """sha of the newest checkpoint on disk, once nothing is under way."""
        there = [self._known[path.name] for path in self._folder.iterdir() if path.name in self._known]
        return max(there, key=lambda sha: self.manifests[sha].step, default="")

    def evidence(
        self, journals: Sequence[Path], script: Script | None, waiting: frozenset[int] = frozenset()
    ) -> history.Evidence:
        """script: of the fake workers, None with real ones."""
        self.look()
        marks = notes(script) if script else {}
        lines = [line for path in journals for line in journal.read(path)]
        return history.Evidence(
            journal=lines, manifests=self.manifests, batches=self.batches, newest=self.newest, waiting=waiting,
            told=marks.get("told", frozenset()), fenced=marks.get("fenced", frozenset()), signed=script is not None,
        )  # fmt: skip


def notes(script: Script) -> dict[str, frozenset[str]]:
    """Marks of the fakes about checkpoints (`told`, `fenced`, `live`): kind -> shas."""
    found: dict[str, set[str]] = {}
    for mark in script.marks():
        kind, _, sha = mark.partition(" ")[0].partition(":")
        found.setdefault(kind, set()).add(sha)
    return {kind: frozenset(shas) for kind, shas in found.items()}


def verified(script: Script, tokens: tuple[int, ...]) -> bool:
    """Whether the engine has said of the weights that these tokens name that they are live."""
    weights = "".join(map(chr, tokens)).rstrip("$")
    return any(sha[:SIGNED] == weights for sha in notes(script).get("live", ()))
