"""Writes the files of one checkpoint to a staging folder, several large ones in parallel.

Every file is durable before `manifest.json` is begun, so a manifest that can be read describes a complete folder, even after a
power loss. An error of a thread is raised before that. It imports no torch, so code without tensors can use it too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any, Self

from artd_schema.codec import digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.data.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    CheckpointManifest,
    FileEntry,
    WeightEntry,
    WeightTable,
)

CHUNK = 32 << 20
"""Bytes of a large file that are hashed and written at a time."""
BUFFERS = 3
"""Chunks of a file in memory: one is made while one is hashed and one is written."""
STREAMS = 8
"""Files that are written in parallel; the next one begins when one of them has ended."""
SYNC_EVERY = 8 * CHUNK
"""Bytes after which the file is synced. Otherwise Linux keeps a file of some GB in memory until its final fsync."""


class Files:
    """Writes the files of one checkpoint. `finish` completes it; until then it has no manifest and does not count.

    After `with`, none of its threads works any more. `progress` is called after each file and each chunk of a large one, by the
    thread that wrote it.
    """

    def __init__(self, folder: Path, progress: Callable[[], None] = lambda: None) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.folder = folder
        self._progress = progress
        self._files: list[FileEntry] = []
        self._streams: list[Future[FileEntry]] = []
        self._pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="artd-stage")
        self._stop = Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def add(self, name: str, data: bytes) -> None:
        _write_file(self.folder / name, data)
        self._files.append(FileEntry(name, len(data), digest(data)))
        self._progress()

    def stream(self, name: str, chunks: Iterator[memoryview]) -> None:
        """Write a file in parallel to others; `finish` raises its errors.

        Another thread reads `chunks`, one at a time. A chunk's memory may be used again when the chunk `BUFFERS` later is
        requested.
        """
        self._streams.append(self._pool.submit(_pour, self.folder / name, chunks, self._stop, self._progress))

    def json(self, name: str, value: object) -> None:
        self.add(name, to_json(value))

    def weights(self, mode: str, entries: Iterable[WeightEntry], held: Iterable[WeightEntry] = ()) -> None:
        self.json(WEIGHTS_FILE, WeightTable(mode=mode, tensors=tuple(entries), held=tuple(held)))

    def finish(self, **fields: Any) -> str:
        """Write the manifest with these further fields. Returns its sha256. Raises OSError of any file."""
        for error in self._wait():
            raise error
        self._files += [one.result() for one in self._streams]
        data = to_json(CheckpointManifest(files=tuple(sorted(self._files, key=lambda f: f.name)), **fields))
        _sync(self.folder)
        reach("stage.files")
        _write_file(self.folder / MANIFEST_FILE, data)
        _sync(self.folder)
        _sync(self.folder.parent)
        reach("stage.manifest")
        return digest(data)

    def _wait(self) -> list[BaseException]:
        """Wait until every stream has ended. Returns the errors. The first one that fails ends the others."""
        done, _ = wait(self._streams, return_when=FIRST_EXCEPTION)
        if any(one.exception() for one in done):
            self._stop.set()
        errors = [error for one in self._streams if (error := one.exception())]
        # The first error comes first; the others only say that they were stopped.
        return sorted(errors, key=lambda error: isinstance(error, Stopped))


class Stopped(Exception):
    """Raised in a stream that must end because another one failed."""


def _pour(path: Path, chunks: Iterator[memoryview], stop: Event, progress: Callable[[], None]) -> FileEntry:
    """Write a whole file and fsync it. Hashing, writing and syncing release the interpreter, so each has a thread."""
    if stop.is_set():
        raise Stopped(f"{path.name} was given up")
    sha, size, unsynced, handle = hashlib.sha256(), 0, 0, _create(path)
    under_way: deque[tuple[Future[None], Future[None]]] = deque()
    with (
        os.fdopen(handle, "wb", buffering=0),
        ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as writing, ThreadPoolExecutor(1) as syncing,
    ):  # fmt: skip
        synced = syncing.submit(lambda: None)
        for chunk in chunks:
            under_way.append((hashing.submit(sha.update, chunk), writing.submit(_write, handle, chunk)))
            size, unsynced = size + len(chunk), unsynced + len(chunk)
            if len(under_way) == BUFFERS:
                _settle(under_way.popleft())
                progress()
            if unsynced >= SYNC_EVERY and synced.done():
                synced.result()
                synced, unsynced = syncing.submit(os.fdatasync, handle), 0
            if stop.is_set():
                raise Stopped(f"{path.name} was given up")
        for one in under_way:
            _settle(one)
        synced.result()
        os.fsync(handle)
    progress()
    return FileEntry(path.name, size, sha.hexdigest())


def _settle(chunk: tuple[Future[None], Future[None]]) -> None:
    for one in chunk:
        one.result()


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)


def _write(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _write_file(path: Path, data: bytes) -> None:
    with os.fdopen(_create(path), "wb", buffering=0) as file:
        _write(file.fileno(), memoryview(data))
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
