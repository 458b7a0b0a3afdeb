"""Defines the names inside the data folder.

Every folder that a fence protects has (job, fence) in its name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from artd.store import fs
from artd.store.blobs import place
from artd_schema import paths
from artd_schema.packages import DIGITS

STAGED = re.compile(r"job-\d+-f\d+|pack-s\d+-\d+-\d+")
"""Names below `tmp` that only artd makes."""
SERVER = "-server"
"""The end of the name under which an engine's server logs, after the engine's own."""
CHECKPOINT = re.compile(r"checkpoints/(?P<run>[^/]+)/l\d+-s\d+-j(?P<job>\d+)-f(?P<fence>\d+)")
"""The paths that `DataDir.checkpoint` returns."""
CODE_COPY = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
"""Names below `code` that only artd makes: `digest_files` returns them."""


@dataclass
class DataDir:
    """The paths of one data folder. `root` is DATA, mode 0700. `runtime` is the folder of the sockets; `sockets` changes it when
    the first one was removed."""

    root: Path
    runtime: Path

    @classmethod
    def make(cls, root: Path) -> DataDir:
        """Create the folders of a data folder. Returns their paths."""
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
        """The folder to which a start moves checkpoint folders that the database does not know."""
        return self.root / "unknown"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    def blob(self, sha: str) -> str:
        """Return the path of a blob."""
        return str(self.blobs / place(sha))

    def staging(self, job: int, fence: int) -> Path:
        """Return the folder where a worker stages the result of (job, fence)."""
        return self.tmp / f"job-{job}-f{fence}"

    def packing(self, step: int, number: int) -> Path:
        """Return the folder where the `number`-th packer of this process writes the batch of a step."""
        return self.tmp / f"pack-s{step}-{os.getpid()}-{number}"

    def checkpoint(self, run: str, lineage: int, step: int, job: int, fence: int) -> str:
        """Return the final folder of a checkpoint, relative to the data folder."""
        return f"checkpoints/{run}/l{lineage}-s{step:06d}-j{job}-f{fence}"

    def log(self, worker: str) -> Path:
        return self.logs / f"{worker}.log"

    def server_log(self, engine: str) -> Path:
        """Return the file to which an engine's server writes its output."""
        return self.log(f"{engine}{SERVER}")

    def scratch_record(self, engine: str) -> Path:
        """Return the file that lists what an engine's server holds in /dev/shm and /tmp (artd_schema.run.scratch)."""
        return self.server_log(engine).with_suffix(".scratch")

    def scratch_records(self) -> dict[str, Path]:
        """Return every such file, by its engine."""
        return {path.stem.removesuffix(SERVER): path for path in self.logs.glob(f"*{SERVER}.scratch")}

    def spawn_dir(self, worker: str, spawn: int) -> Path:
        """Return the folder for sockets and TMPDIR of one process of a worker. Its name is short, because a socket's path is."""
        kind, *numbers = worker.split("-")
        return self.runtime / f"{kind[0]}{'-'.join([*numbers, str(spawn)])}"
