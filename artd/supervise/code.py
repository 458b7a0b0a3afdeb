"""Installs the code that managed children run, under DATA/code/: one content-addressed copy of `artd_schema` and
`artd_workers`, and one of each package that brings a loss or a model family (`packages.py`).

Owns DATA/code/. A folder there is complete or absent (artd writes it aside, fsyncs it, then renames it), and its name
is the digest of its names and contents. A lock on DATA/code lets one process at a time write there, so an unfinished
copy that it finds belongs to a dead process. artd locates `artd_workers` but never imports it. This works from a
checkout and from a wheel.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from artd_schema.packages import digest_files, read_tree
from artd_schema.paths import boot_id

PACKAGES = ("artd_schema", "artd_workers")
_ASIDE = ".new-"


class CodeError(Exception):
    """artd cannot find the children's code."""


def install_code(data: Path, packages: Iterable[str] = PACKAGES) -> Path:
    """Install the packages of the running artd in DATA/code/<12 hex>. Returns that folder; its name is the build.

    It keeps an intact copy, and replaces one whose contents do not match its name.
    Raises CodeError when a package cannot be located, OSError when the copy cannot be written.
    """
    files: dict[str, bytes] = {}
    for package in packages:
        files |= read_tree(_locate(package), package)
    return install_files(data, files)


def install_files(data: Path, files: Mapping[str, bytes]) -> Path:
    """Install these files in DATA/code/<their digest> and return that folder. Raises OSError if the copy cannot be
    written."""
    root = data / "code"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = root / digest_files(files)
    with lock_copies(root):
        for left in root.glob(f"{_ASIDE}*"):
            shutil.rmtree(left)
        _install(target, files)
        os.utime(target)  # its age says when it was last needed
    return target


def _install(target: Path, files: Mapping[str, bytes]) -> None:
    if target.is_dir() and digest_files(read_tree(target)) == target.name:
        _drop_old_byte_code(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=target.parent))
    try:
        _write_tree(aside / "new", files)
        if target.exists():
            target.rename(aside / "damaged")
        (aside / "new").rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(aside)
    _drop_old_byte_code(target)


@contextmanager
def lock_copies(root: Path) -> Iterator[None]:
    """Let one process at a time install: a command in the trainer's interpreter installs too while a daemon runs."""
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _drop_old_byte_code(folder: Path) -> None:
    """Remove the byte code that an earlier boot of the machine wrote.

    Python writes byte code without fsync, so a power loss can leave half a file, which Python then fails to import for ever.
    """
    marker = folder / ".boot"
    if marker.exists() and marker.read_text() == boot_id():
        return
    for cache in list(folder.rglob("__pycache__")):
        shutil.rmtree(cache)
    marker.write_text(boot_id())


def _locate(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places or not Path(places[0]).is_dir():
        raise CodeError(f"package {package!r} is not a folder beside artd: install artd again (pip install artd)")
    return Path(places[0])


def _write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    parents = {folder}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        parents.update(parent for parent in path.parents if parent.is_relative_to(folder))
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    for parent in parents:
        _sync(parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
