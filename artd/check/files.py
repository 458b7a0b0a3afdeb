"""Compares files with rows: every blob and every committed checkpoint folder exists and is whole; other files become
notes.

Without `deep` it compares sizes, and the sha256 of files that it reads anyway (manifests); with `deep` it compares
every sha256.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from artd.datadir.layout import DataDir
from artd.store.blobs import TRASH, hash_file, place
from artd.training import commit
from artd_schema.codec import UNREADABLE, digest
from artd_schema.data.manifest import MANIFEST_FILE, CheckpointManifest

from .listing import Listing
from .report import Note, Violation

THREADS = 2
NAMED = 5


def found_blobs(data: DataDir) -> dict[str, int]:
    """Return the size in bytes of every file below `blobs`, by its path there."""
    found: dict[str, int] = {}
    for folder in _entries(data.blobs):
        if not folder.is_dir(follow_symlinks=False):
            found[folder.name] = folder.stat(follow_symlinks=False).st_size
            continue
        for entry in _entries(folder.path):
            try:
                found[f"{folder.name}/{entry.name}"] = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # the daemon removed it after the folder was listed
    return found


def blobs(data: DataDir, listing: Listing, found: dict[str, int], deep: bool) -> Iterator[Violation]:
    """Check `blob.file`: every blob has its file with its size, and with `deep` with its sha256."""
    whole: list[str] = []
    for sha, size in listing.blobs.items():
        name = place(sha)
        if name not in found:
            yield Violation(f"blobs/{name}", "is missing, but has a row")
        elif found[name] != size:
            yield Violation(f"blobs/{name}", f"has {found[name]} bytes, its row says {size}")
        else:
            whole.append(sha)
    if deep:
        with ThreadPoolExecutor(THREADS) as pool:
            for sha, text in zip(whole, pool.map(lambda sha: _damage(data, sha), whole), strict=True):
                if text:
                    yield Violation(f"blobs/{place(sha)}", text)


def _damage(data: DataDir, sha: str) -> str:
    """Return what is wrong with a blob's bytes, "" for nothing."""
    try:
        real, _ = hash_file(Path(data.blob(sha)))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if real == sha else f"has sha256 {real}: it is damaged"


def checkpoints(data: DataDir, listing: Listing, deep: bool) -> Iterator[Violation]:
    """Check `checkpoint.files`: a folder holds exactly the files of its manifest with their sizes, and with `deep` with their
    sha256."""
    for row in listing.checkpoints:
        for text in _check_folder(data.root / row["dir"], row["sha"], row["bytes"], deep):
            yield Violation(row["dir"], text)


def _check_folder(folder: Path, sha: str, size: int, deep: bool) -> Iterator[str]:
    try:
        raw = (folder / MANIFEST_FILE).read_bytes()
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
        present = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}
    except (OSError, *UNREADABLE) as error:
        yield f"its manifest.json cannot be read: {error}"
        return
    if digest(raw) != sha:
        yield f"its manifest.json has sha256 {digest(raw)}, its row says {sha}"
    if (total := sum(entry.bytes for entry in manifest.files)) != size:
        yield f"its files have {total} bytes by the manifest, {size} by the row"
    expected = {entry.name: entry.bytes for entry in manifest.files} | {MANIFEST_FILE: len(raw)}
    wrong = sorted(name for name in expected.keys() | present.keys() if expected.get(name) != present.get(name))
    if wrong:
        yield f"files that are missing, unknown or of another size: {', '.join(wrong)}"
    elif deep:
        try:
            commit.verify(folder)
        except (commit.BadResult, OSError) as error:
            yield str(error)


# ---- notes ----------------------------------------------------------------------------------------------------------


def notes(data: DataDir, listing: Listing, found: dict[str, int]) -> tuple[Note, ...]:
    """Return notes on files without references, and on rows of such files. They are no violations."""
    rows = {place(sha) for sha in listing.blobs}
    trash = sorted(f"blobs/{name}" for name in found if name.startswith(f"{TRASH}/"))
    known = {row["dir"] for row in listing.checkpoints}
    folders = [
        f"checkpoints/{run.name}/{entry.name}" for run in _entries(data.checkpoints) for entry in _entries(run.path)
    ]
    loose = {
        "blobs without a row": ("files that no row knows; the daemon collects them",
                                sorted(f"blobs/{name}" for name in found if name not in rows and not name.startswith(f"{TRASH}/"))),
        "trashed blobs": ("collected; the next pass removes them", trash),
        "blobs that nothing refers to": ("rows and files that no trajectory and no batch needs; the daemon collects them",
                                         sorted(f"blobs/{place(sha)}" for sha in listing.blobs if sha not in listing.used)),
        "retired checkpoints": ("their files go soon, or at the next start", sorted(listing.retired.intersection(folders))),
        "checkpoint folders without a row": ("published but not committed; the next start commits, removes or moves them aside",
                                             sorted(set(folders) - known - listing.retired)),
        "staged": ("work under way, or left by a crash; removed at the next start",
                   sorted(f"tmp/{entry.name}" for entry in _entries(data.tmp))),
    }  # fmt: skip
    return tuple(Note(name, text, len(names), tuple(names[:NAMED])) for name, (text, names) in loose.items() if names)


def _entries(folder: str | Path) -> Iterable[os.DirEntry[str]]:
    """Return the entries of a folder, none if it does not exist or is no folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
