"""Makes a runtime from its lock: checks first what would make it fail, then builds, tests and marks it.

One install of a folder runs at a time (flock). A folder without a marker is deleted and made again. The marker is written after
the self-check, so an interrupted install never counts as complete.
"""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import diagnose, lockfile, paths, pip, plan, pythons, registry
from .lockfile import Lock

LOG_TAIL_LINES = 15


class InstallError(Exception):
    """The runtime could not be made; the text says what is missing and what to do."""


@dataclass(frozen=True)
class Options:
    index: str | None = None
    find_links: str | None = None
    python: str | None = None
    force: bool = False

    @property
    def sources(self) -> list[str]:
        """Return the package sources that the user named, as pip's flags."""
        index = ["--extra-index-url", self.index] if self.index else []
        return index + (["--find-links", self.find_links] if self.find_links else [])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def install(name: str, device: str, options: Options) -> registry.Runtime:
    found = _interpreter(name, device, options.python)
    python, lock = found.path, lockfile.load(name, device, found.minor)
    folder = registry.folder_of(lock)
    if shortage := _shortage(lock, folder, options.force):
        raise InstallError(shortage)
    paths.runtimes_root().mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        marker = registry.read_marker(folder, lock.digest)
        if marker is None or options.force:
            _make(lock, folder, python, options)
            marker = registry.read_marker(folder, lock.digest)
            assert marker is not None
            say(f"{lock.folder_name}: ready, {marker.size_bytes / 1e9:.2f} GB, {marker.seconds:.0f} s")
        else:
            say(f"{lock.folder_name}: ready, unchanged")
    return registry.find(name, device)


def _interpreter(name: str, device: str, asked: str | None) -> pythons.Found:
    """Return the interpreter that the user named, else one of a version that has a lock. Raises InstallError."""
    if asked is not None:
        found = pythons.check_asked(asked)
    elif minors := lockfile.minors(name, device):
        found = pythons.find_any(minors, fetch=True)
    else:
        found = pythons.Found(
            sys.executable, paths.minor_of_running()
        )  # `lockfile.load` refuses it and names the locks that exist
    if not found.path:
        raise InstallError(f"runtime {name}: {found.why}")
    return found


def _shortage(lock: Lock, folder: Path, force: bool) -> str | None:
    if not force and registry.read_marker(folder, lock.digest):
        return None
    return diagnose.disk_shortage(lock.stem, folder)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of one folder's install; a second install waits and says which process it waits for."""
    path = folder.parent / f".{folder.name}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        said = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
                    say(f"{folder.name}: another install is running (process {holder}); waiting")
                    said = True
                time.sleep(0.2)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _make(lock: Lock, folder: Path, python: str, options: Options) -> None:
    started = time.monotonic()
    if folder.exists():
        say(f"{lock.folder_name}: deleting what an earlier install left")
        _delete(folder)
    paths.log_root().mkdir(parents=True, exist_ok=True)
    log = paths.log_root() / f"{lock.folder_name}.log"
    log.write_text(f"{lock.folder_name} from {python}\n")
    temporary = _temporary(folder)
    _delete(temporary)
    temporary.mkdir()
    try:
        interpreter = _build(lock, folder, python, options, log)
    except pip.PipFailed as failed:
        _delete(folder)
        raise InstallError(_explain(lock, failed.log, python)) from None
    except BaseException:
        _delete(folder)
        raise
    finally:
        _delete(temporary)
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    seconds = round(time.monotonic() - started, 1)
    registry.write_marker(folder, registry.Marker(lock.digest, str(interpreter), seconds, size, lock.versions))


def _temporary(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.tmp"


def _delete(folder: Path) -> None:
    """Delete a folder. Its marker goes first, so that an interrupted deletion never leaves a folder that looks complete."""
    (folder / paths.MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _build(lock: Lock, folder: Path, python: str, options: Options, log: Path) -> Path:
    """Make the environment or the overlay's folder, install the packages and run the self-check. Returns its interpreter."""
    if lock.stem == lockfile.OVERLAY:
        interpreter = registry.find("megatron").python
        target = ["--target", str(folder / "site")]
        site = folder / "site"
        folder.mkdir()
    else:
        interpreter = folder / "bin" / "python"
        target = []
        site = folder / "lib" / f"python3.{lock.minor[3:]}" / "site-packages"
        say(f"{lock.folder_name}: making the environment with {python}")
        pip.run([python, "-I", "-m", "venv", str(folder)], log, _temporary(folder), lambda _: None)
    torch_index = plan.torch_index(lock, interpreter, options.sources)
    if torch_index:
        say(f"{lock.folder_name}: pip is configured with no index of its own; adding {torch_index[1]} for torch")
    progress = pip.Progress(lock.folder_name, len(lock.pins))

    def poll(fetched: int) -> None:
        installed = sum(1 for _ in site.glob("*.dist-info")) if site.exists() else 0
        progress.show(*(("installed", installed) if installed > 3 else ("fetched", fetched)))

    for pins, flags in plan.stages(lock, options.sources, torch_index):
        pip.run(plan.pip_command(interpreter, target + flags, pins), log, _temporary(folder), poll)
    progress.show("installed", len(lock.pins), final=True)
    _self_check(lock, interpreter, folder, log)
    return interpreter


def _self_check(lock: Lock, interpreter: Path, folder: Path, log: Path) -> None:
    if lock.checks:
        say(f"{lock.folder_name}: checking that {', '.join(lock.checks)} can be imported")
        pip.run(
            [str(interpreter), "-W", "ignore", "-c", f"import {', '.join(lock.checks)}"],
            log,
            _temporary(folder),
            lambda _: None,
        )


def _explain(lock: Lock, log: Path, python: str) -> str:
    text = log.read_text(errors="replace")
    why = diagnose.find_cause(text)
    if lock.needs_compiler and "Building wheel" in text:
        if diagnose.compiler() is None:
            why = "a package comes as source here and no C++ compiler was found. Next: install one (Debian: g++)"
        elif diagnose.headers(python) is None:
            why = f"a package comes as source here and {python} has no Python.h. Next: install its -dev package"
    tail = "\n".join(f"  | {line}" for line in text.splitlines()[-LOG_TAIL_LINES:])
    return f"{lock.folder_name}: {why}\n{tail}\n  the whole log: {log}"
