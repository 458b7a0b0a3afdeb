"""What a disk may hold after a power loss: replays recorded operations, and loses part of what no fsync made durable.

It models one folder, without I/O, and its caller gives the seed. By POSIX this is durable, and no more:

* fsync of a file makes its present content durable (every earlier write and truncate), but not its name; * fsync of a folder
makes the names in it durable (create, mkdir, link, rename, unlink, rmdir in that folder), but not the content of the files.

Everything else may be lost. Of a file's later writes any subset survives, in order. A hole that a lost write leaves reads as
zeros. The last surviving write may be torn at a sector of 512 bytes. Of later changes of names:

* `adversarial`: any subset survives. A rename within a folder is atomic. A rename between folders is two changes (a new name
there, no name here), of which either may be lost. No journal allows as much, so what survives this survives any file system. *
`ordered`, as ext4 and XFS with a journal: a prefix of all changes of names survives, which has at least everything before the
last one that an fsync of a folder made durable. Contents still are not ordered with names: a rename may survive without the
content (ext4's zero-length files).

An fsync of a file that fails drops the pending writes: the running system still sees them, and no later fsync makes them
durable; only what is written again becomes durable (ext4, XFS and Btrfs keep such pages, clean). SQLite's own writes are
treated like all others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .shim import Op, Record

SECTOR = 512


class Write(NamedTuple):
    """A change of a file's content. data None: the file gets `offset` bytes long."""

    offset: int
    data: bytes | None


def apply(content: bytearray, change: Write) -> None:
    end = change.offset + len(change.data or b"")
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if change.data is None:
        del content[change.offset :]
    else:
        content[change.offset : end] = change.data


@dataclass(eq=False)
class File:
    """seen: the content as the running system has it, where some of it was dropped."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)
    seen: bytearray | None = None

    def add(self, change: Write) -> None:
        self.pending.append(change)
        if self.seen is not None:
            apply(self.seen, change)

    def drop(self) -> None:
        """An fsync failed."""
        self.seen = self.running()
        self.pending = []

    def running(self) -> bytearray:
        return bytearray(self.seen) if self.seen is not None else self.content(self.pending)

    def sync(self) -> None:
        for change in self.pending:
            apply(self.durable, change)
        self.pending = []

    def content(self, kept: Iterable[Write]) -> bytearray:
        made = bytearray(self.durable)
        for change in kept:
            apply(made, change)
        return made


@dataclass(eq=False)
class Folder:
    """durable, entries: name -> node, on the disk for certain and as the running system sees it."""

    durable: dict[str, Node] = field(default_factory=dict)
    entries: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


@dataclass(eq=False)
class Change:
    """Names of one folder that change together. number: of the operation; node None: the name goes."""

    number: int
    folder: Folder
    names: dict[str, Node | None]


class Survival(NamedTuple):
    """How much of what is not durable survives: chances of a change of names and of a write; ordered: names by journal; torn:
    the last write of a file that survives may be cut."""

    names: float
    writes: float
    ordered: bool = False
    torn: bool = False

    def __str__(self) -> str:
        return f"names {self.names:.0%}{' ordered' if self.ordered else ''}, writes {self.writes:.0%}{' torn' if self.torn else ''}"


NOTHING, EVERYTHING = Survival(0, 0), Survival(1, 1)
SURVIVALS = (
    NOTHING, EVERYTHING, Survival(1, 0), Survival(0, 1), Survival(0.5, 0.5), Survival(0.5, 0.5, ordered=True, torn=True),
    Survival(0.5, 0, ordered=True), Survival(1, 0.5, torn=True), Survival(0.8, 0.9, torn=True),
)  # fmt: skip


class Disk:
    """The folder `root` as operations change it, from what lies there now, which is durable."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._nodes: dict[int, Node] = {}  # by inode number, which is given out again after a delete
        self._changes: list[Change] = []
        self._settled = 0  # the newest change of names that an fsync made durable
        self.sequence = 0
        self.root = self._scan(root)

    def _scan(self, path: Path) -> Folder:
        folder = Folder()
        self._nodes[path.stat().st_ino] = folder
        for entry in path.iterdir():
            if entry.is_dir():
                folder.entries[entry.name] = self._scan(entry)
            elif entry.is_file():
                made = self._nodes[entry.stat().st_ino] = File(bytearray(entry.read_bytes()))
                folder.entries[entry.name] = made
        folder.durable = dict(folder.entries)
        return folder

    # ---- what happens ---------------------------------------------------------------------------------------------------

    def play(self, record: Record) -> None:
        """The operation happened."""
        assert record.sequence == self.sequence + 1, f"record {self.sequence + 1} is missing"
        self.sequence = record.sequence
        match record.op:
            case Op.CREATE | Op.MKDIR:
                made: Node = File() if record.op is Op.CREATE else Folder()
                self._nodes[record.inode] = made
                self._name({record.path: made})
            case Op.WRITE | Op.TRUNCATE:
                node = self._nodes[record.inode]
                assert isinstance(node, File)
                if record.data or record.op is Op.TRUNCATE:
                    node.add(Write(record.offset, record.data if record.op is Op.WRITE else None))
            case Op.RENAME:
                self._name({record.path2: self._nodes[record.inode], record.path: None})
            case Op.LINK:
                self._name({record.path2: self._nodes[record.inode]})
            case Op.UNLINK | Op.RMDIR:
                self._name({record.path: None})
            case Op.FSYNC:
                self._sync(self._nodes[record.inode])
            case Op.LOST:
                if isinstance(node := self._nodes[record.inode], File):
                    node.drop()

    def _name(self, names: dict[str, Node | None]) -> None:
        changes: dict[Folder, Change] = {}
        for path, node in names.items():
            folder, name = self._parent(path)
            if folder is None:  # outside
                continue
            change = changes.setdefault(folder, Change(self.sequence, folder, {}))
            change.names[name] = node
            _set(folder.entries, name, node)
        self._changes += changes.values()

    def _parent(self, path: str) -> tuple[Folder | None, str]:
        *folders, name = path.removeprefix(self._root).strip("/").split("/")
        if not path.startswith(self._root):
            return None, name
        at: Node = self.root
        for part in folders:
            assert isinstance(at, Folder)
            at = at.entries[part]
        assert isinstance(at, Folder)
        return at, name

    def _sync(self, node: Node) -> None:
        if isinstance(node, File):
            node.sync()
            return
        for change in [change for change in self._changes if change.folder is node]:
            for name, target in change.names.items():
                _set(node.durable, name, target)
            self._settled = max(self._settled, change.number)
            self._changes.remove(change)

    # ---- what is left ---------------------------------------------------------------------------------------------------

    def write_image(
        self, target: Path, survival: Survival, rng: random.Random, wanted: Callable[[str], bool] = lambda name: True
    ) -> None:
        """A disk on which the power went off now. wanted: whether a path below it is written."""
        entries: dict[Folder, dict[str, Node]] = {}
        for change in self._kept(survival, rng):
            for name, node in change.names.items():
                _set(entries.setdefault(change.folder, dict(change.folder.durable)), name, node)

        def put(folder: Folder, path: Path, under: str) -> None:
            path.mkdir(mode=0o700)
            for name, node in entries.get(folder, folder.durable).items():
                if not wanted(under + name):
                    continue
                if isinstance(node, Folder):
                    put(node, path / name, f"{under}{name}/")
                else:
                    (path / name).write_bytes(node.content(_survivors(node.pending, survival, rng)))

        put(self.root, target, "")

    def _kept(self, survival: Survival, rng: random.Random) -> list[Change]:
        if not survival.ordered:
            return [change for change in self._changes if rng.random() < survival.names]
        settled = [change for change in self._changes if change.number <= self._settled]
        rest = self._changes[len(settled) :]
        numbers = sorted({change.number for change in rest})
        last = numbers[: rng.randint(0, len(numbers))][-1:]
        return settled + [change for change in rest if last and change.number <= last[0]]

    def assert_like(self, root: Path, wanted: Callable[[str], bool]) -> None:
        """The model is what really lies in the folder: nothing changed it unseen."""

        def compare(folder: Folder, path: Path) -> None:
            names = {entry.name for entry in path.iterdir() if wanted(str(entry))}
            modelled = {name for name in folder.entries if wanted(str(path / name))}
            assert names == modelled, f"{path}: {', '.join(sorted(names ^ modelled))} changed unseen"
            for name in names:
                node = folder.entries[name]
                if isinstance(node, Folder):
                    compare(node, path / name)
                else:
                    assert (path / name).read_bytes() == node.running(), path / name

        compare(self.root, root)


def _set(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _survivors(pending: list[Write], survival: Survival, rng: random.Random) -> list[Write]:
    kept = [change for change in pending if rng.random() < survival.writes]
    if survival.torn and kept and (last := kept[-1]).data:
        edges = range((last.offset // SECTOR + 1) * SECTOR, last.offset + len(last.data), SECTOR)
        kept[-1] = Write(last.offset, last.data[: rng.choice([last.offset, *edges]) - last.offset])
    return kept
