"""Names inside the data folder, in one place.

Owner of: nothing. Invariants: every folder that a fence protects carries (job, fence) in its name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from artd.store import fs
from artd.store.blobs import place
from artd_schema import paths

STAGED = re.compile(r"job-\d+-f\d+|pack-s\d+-\d+-\d+")
"""Names below `tmp` that artd alone makes."""
CHECKPOINT = re.compile(r"checkpoints/(?P<run>[^/]+)/l\d+-s\d+-j(?P<job>\d+)-f(?P<fence>\d+)")
"""As `DataDir.checkpoint` makes them."""


@dataclass
class DataDir:
    """root: DATA, 0700; runtime: folder of the sockets, another one when the first was taken away (`sockets`)."""

    root: Path
    runtime: Path

    @classmethod
    def make(cls, root: Path) -> DataDir:
        fs.make_dir(root)
        root.chmod(0o700)
        data = cls(root, paths.runtime_dir(root))
        for folder in (data.tmp, data.logs, data.checkpoints, data.code, data.blobs):
            fs.make_dir(folder)
        return data

    @property
    def database(self) -> Path:
        return self.root / paths.DATABASE

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def logs(self) -> Path:
        return self.root / paths.LOGS

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def unknown(self) -> Path:
        """Where a start puts checkpoint folders that the database does not know."""
        return self.root / "unknown"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    def blob(self, sha: str) -> str:
        """Path of a blob."""
        return str(self.blobs / place(sha))

    def staging(self, job: int, fence: int) -> Path:
        """Where a worker stages the result of (job, fence)."""
        return self.tmp / f"job-{job}-f{fence}"

    def packing(self, step: int, number: int) -> Path:
        """Where the `number`-th packer of this process writes the batch of a step."""
        return self.tmp / f"pack-s{step}-{os.getpid()}-{number}"

    def checkpoint(self, run: str, lineage: int, step: int, job: int, fence: int) -> str:
        """Final folder of a checkpoint, relative to the data folder."""
        return f"checkpoints/{run}/l{lineage}-s{step:06d}-j{job}-f{fence}"

    def log(self, worker: str) -> Path:
        return self.logs / f"{worker}.log"

    @property
    def scratch_record(self) -> Path:
        """What the engine's server holds in /dev/shm and /tmp (artd_schema.scratch)."""
        return self.logs / "engine-server.scratch"

    def spawn_dir(self, worker: str, spawn: int) -> Path:
        """Sockets and TMPDIR of one process of a worker."""
        return self.runtime / f"{worker[0]}{spawn}"
