"""Checks the base model's files in the process that loads them: each must have the sha256 that the run was made with.

A worker is ready only after every file has matched. Later loads must see the same files (size, mtime, inode). Threads hash the
files while the interpreter and the engine start, so a machine whose page cache holds the model reads the disk once.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from artd_schema.data.base import BaseFile, BaseModel

THREADS = 8
Stamp = tuple[int, int, int]


class BaseChanged(Exception):
    """A file of the base model is not the one that the run was made with."""


class BaseFiles:
    """Hashes the files in threads, from its creation on. `pinned`: None = nothing is known of the files and nothing is checked."""

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
                # Daemon threads, because a process that ends would wait for an executor's threads.
                Thread(target=_hash_all, args=(jobs,), name="artd-base", daemon=True).start()

    def verify(self) -> None:
        """Wait for the hashes and compare them. Raises BaseChanged."""
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
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Check, after the weights were loaded, that they came from the hashed files. Raises BaseChanged."""
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
    """Hash files of the queue until it is empty."""
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
