"""The LD_PRELOAD shim (shim.c): builds it once, switches it on by environment variables, and reads its log. Only the processes
that the driver starts are preloaded, never the driver."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tests.compiled import library

SOURCE = Path(__file__).with_name("shim.c")
HEADER = struct.Struct("<QQqIIIIII")
WORDS = struct.Struct("<QQQQ256s")
SHARED_BYTES = 4096
SKIPPED = ("/logs/", "-shm", "/daemon.log", "/script.json", "/script.tmp")
"""Never durable, or never to be: SQLite's wal-index, what workers print, the rig's own files."""


class Op(IntEnum):
    """LOST: an fsync of a file failed by order, and the kernel drops what it was to write."""

    CREATE = 1
    MKDIR = 2
    WRITE = 3
    TRUNCATE = 4
    RENAME = 5
    UNLINK = 6
    RMDIR = 7
    LINK = 8
    FSYNC = 9
    UNKNOWN = 10
    LOST = 11


@dataclass(frozen=True, slots=True)
class Record:
    """One operation. offset: of a write, or the size after a truncate; sequence counts from 1, without gaps."""

    sequence: int
    op: Op
    inode: int
    offset: int
    pid: int
    path: str
    path2: str
    data: bytes


@dataclass(frozen=True)
class Failure:
    """op: write, truncate, fsync, rename, unlink, create, any of these, or exec (which does not fail: the process is stopped right
    before it); number: which of them, from 1, or 0 for the one that `fail_next` says; stays: all after it too; kind: daemon, worker or
    any; part: of the path, without blanks; of an exec `^ARGV0|ARGV1|...`."""

    op: str
    number: int
    error: int
    stays: bool = False
    kind: str = "any"
    part: str = ""

    def __str__(self) -> str:
        return f"{self.op}:{self.number}:{self.error}:{'on' if self.stays else 'once'}:{self.kind}:{self.part}"


class Shim:
    """One set of processes that share a count and a log. folder: for both, outside `root`; root: what is looked at."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.root = root.resolve()
        self.log = folder / "operations"
        self._shared = folder / "shared"
        self._shared.write_bytes(bytes(SHARED_BYTES))

    def environment(self, failure: Failure | None = None, record: bool = True) -> dict[str, str]:
        """Variables for a process that is to be recorded, or to fail."""
        variables = {
            "LD_PRELOAD": str(library(SOURCE)),
            "ARTD_SHIM_ROOT": str(self.root),
            "ARTD_SHIM_SKIP": ":".join(SKIPPED),
            "ARTD_SHIM_SHARED": str(self._shared),
        }
        if record:
            variables["ARTD_SHIM_LOG"] = str(self.log)
        if failure is not None:
            variables["ARTD_SHIM_FAIL"] = str(failure)
        return variables

    def _words(self) -> tuple[int, int, int, int, bytes]:
        with self._shared.open("rb") as file, mmap.mmap(file.fileno(), SHARED_BYTES, prot=mmap.PROT_READ) as mapped:
            found: tuple[int, int, int, int, bytes] = WORDS.unpack_from(mapped)
            return found

    def fail_next(self) -> None:
        """The next operation that a `Failure` of number 0 fits fails."""
        self._fail_at(self._words()[1] + 1)

    def heal(self) -> None:
        """Nothing that a `Failure` of number 0 fits fails any more."""
        self._fail_at(0)

    def _fail_at(self, number: int) -> None:
        with self._shared.open("r+b") as file, mmap.mmap(file.fileno(), SHARED_BYTES) as mapped:
            struct.pack_into("<Q", mapped, 24, number)

    @property
    def sequence(self) -> int:
        """Operations done so far, by all processes."""
        return self._words()[0]

    @property
    def failed(self) -> int:
        """Operations that failed by order."""
        return self._words()[2]

    @property
    def victim(self) -> str:
        """Path of the last operation that failed by order."""
        return os.fsdecode(self._words()[4].partition(b"\0")[0])

    def records(self) -> Iterator[Record]:
        """The log, oldest first. Errors: AssertionError when something was done that is not modelled."""
        raw, at = self.log.read_bytes(), 0
        while at < len(raw):
            sequence, inode, offset, op, pid, path, path2, data, _ = HEADER.unpack_from(raw, at)
            at += HEADER.size
            texts = []
            for size in (path, path2):
                texts.append(os.fsdecode(raw[at : at + size]))
                at += size
            record = Record(sequence, Op(op), inode, offset, pid, texts[0], texts[1], raw[at : at + data])
            at += data
            assert record.op is not Op.UNKNOWN, f"{record.path2} of {record.path} is not modelled (tests/crash/shim.c)"
            yield record
