"""Which Python a runtime is built from.

Owner: runtimes. Invariants: an interpreter is run before it is chosen (right version, able to make environments); never a
virtual environment's own link, which may be deleted any time. Fetches one with uv only when told to.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ASK = """
import sys
try:
    import ensurepip, venv
except ImportError:
    sys.exit(3)
print(f"py{sys.version_info[0]}{sys.version_info[1]} {getattr(sys, '_base_executable', '') or sys.executable}")
"""
_NO_VENV = 3


@dataclass(frozen=True)
class Found:
    """path: the interpreter, "" when there is none; minor: "py311"; why: why not, and what to do, when there is none."""

    path: str = ""
    minor: str = ""
    why: str = ""


def dotted(minor: str) -> str:
    """`py311` → `3.11`."""
    return f"{minor[2]}.{minor[3:]}"


def asked(name: str) -> Found:
    """The interpreter that the user named: nothing takes its place."""
    path = shutil.which(name)
    if path is None:
        return Found(why=f"interpreter {name} was not found. Next: --python PATH of one that exists")
    found, reason = _ask(path)
    if found is None:
        return Found(why=f"interpreter {name} {reason}")
    return Found(path, found.minor)


def of(minors: Sequence[str], fetch: bool = False) -> Found:
    """The running interpreter if its version is one of `minors`, else the first of this machine that is.
    fetch: have uv download one where there is none."""
    reasons = []
    for path in _candidates(minors):
        found, reason = _ask(path)
        if found is not None and found.minor in minors:
            return found
        if found is None and reason.startswith("has no"):
            reasons.append(f"{path} {reason}")
    if fetch and (path := _fetched(minors[0])):
        found, _ = _ask(path)
        if found is not None:
            return found
    wanted = dotted(minors[0])
    if reasons:
        return Found(why=reasons[0])
    return Found(
        why=f"no Python {wanted} was found here. Next: install it (Debian 12: apt-get install python{wanted}-venv; "
        f"any Linux: uv python install {wanted}), or --python PATH of one"
    )


def _ask(path: str) -> tuple[Found | None, str]:
    """(what it is, "") or (None, what is wrong with it and what to do)."""
    try:
        done = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"does not start ({error}). Next: --python PATH of another"
    if done.returncode == _NO_VENV:
        return None, f"has no venv module. Next: install it (Debian: apt-get install {Path(path).name}-venv)"
    minor, _, base = done.stdout.strip().partition(" ")
    if done.returncode or not base:
        return None, f"does not start (exit {done.returncode}). Next: --python PATH of another"
    return Found(base, minor), ""


def _candidates(minors: Sequence[str]) -> Iterator[str]:
    """Running, on PATH, Debian's own, pyenv's, uv's; each once."""
    seen: set[str] = set()
    for path in _places(minors):
        if path not in seen and os.access(path, os.X_OK):
            seen.add(path)
            yield path


def _places(minors: Sequence[str]) -> Iterator[str]:
    yield getattr(sys, "_base_executable", "") or sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for minor in minors:
        name = f"python{dotted(minor)}"
        for folder in [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]:
            yield str(Path(folder) / name)
        yield from (str(path) for path in sorted(pyenv.glob(f"versions/{dotted(minor)}*/bin/{name}")))
        yield _uv("find", "--no-project", "--system", dotted(minor))


def _fetched(minor: str) -> str:
    """An interpreter downloaded by uv, "" where there is no uv or it cannot."""
    if shutil.which("uv") is None:
        return ""
    print(f"runtime: fetching Python {dotted(minor)} with uv", file=sys.stderr, flush=True)
    _uv("install", "--quiet", dotted(minor))
    return _uv("find", "--no-project", "--system", dotted(minor))


def _uv(*words: str) -> str:
    uv = shutil.which("uv")
    if uv is None:
        return ""
    done = subprocess.run([uv, "python", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
