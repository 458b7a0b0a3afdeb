"""The base model's files, as the process that loads them sees them: hashed against what the run was made with.

Owner of: the threads that hash. Invariants: a worker is ready only after every file had the sha256 that the daemon pinned; what is loaded
later is the same file as was hashed (size, mtime, inode). The files are read while the interpreter and the engine start: on a machine
whose page cache holds the model, the disk is read once.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from artd_schema.base import BaseFile, BaseModel

THREADS = 8
Stamp = tuple[int, int, int]


class BaseChanged(Exception):
    """A file of the base model is not the one that the run was made with."""


class BaseFiles:
    """Hashing begins at once, in threads. pinned: None = nothing is known of the files, and nothing is checked."""

    def __init__(self, folder: str, pinned: BaseModel | None, hashing: bool = True) -> None:
        self._folder = Path(folder)
        self._files = pinned.files if pinned is not None else ()
        self._stamps = {file.name: self._stamp(file) for file in self._files}
        self._hashes: list[tuple[BaseFile, Future[str]]] = []
        if self._files and hashing:
            jobs: SimpleQueue[tuple[Path, Future[str]]] = SimpleQueue()
            for file in sorted(self._files, key=lambda file: -file.bytes):
                self._hashes.append((file, Future()))
                jobs.put((self._folder / file.name, self._hashes[-1][1]))
            for _ in range(min(THREADS, os.cpu_count() or 1)):
                # A process that has to end does not wait for them, as it would for an executor's.
                Thread(target=_hash_all, args=(jobs,), name="artd-base", daemon=True).start()

    def verify(self) -> None:
        """Wait for the hashes. Raises BaseChanged."""
        for file, found in self._hashes:
            try:
                sha = found.result()
            except OSError as error:
                raise BaseChanged(
                    f"base model file {self._folder / file.name} cannot be read: {error.strerror}"
                ) from None
            if sha != file.sha256:
                raise BaseChanged(
                    f"base model file {self._folder / file.name} has sha256 {sha}, the run was made with {file.sha256}: put the "
                    "old one back"
                )
        self.unchanged()

    def unchanged(self) -> None:
        """Called when the weights are loaded: they came from the files that were hashed. Raises BaseChanged."""
        for file in self._files:
            if self._stamp(file) != self._stamps[file.name]:
                raise BaseChanged(
                    f"base model file {self._folder / file.name} changed while it was used: put the old one back"
                )

    def _stamp(self, file: BaseFile) -> Stamp:
        try:
            stat = os.stat(self._folder / file.name)
        except OSError as error:
            raise BaseChanged(f"base model file {self._folder / file.name} cannot be read: {error.strerror}") from None
        return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _hash_all(jobs: SimpleQueue[tuple[Path, Future[str]]]) -> None:
    """Until nothing is left."""
    with suppress(Empty):
        while True:
            path, found = jobs.get_nowait()
            try:
                found.set_result(_sha256(path))
            except Exception as error:
                found.set_exception(error)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
