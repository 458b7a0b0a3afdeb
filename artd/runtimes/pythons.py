"""Finds the Python that a runtime is built from.

An interpreter is run before it is chosen: it must have the right version and be able to make environments. A virtual
environment's own link is never chosen, because it may be deleted at any time. uv downloads an interpreter only on request.
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
    """An interpreter: `path` and `minor` ("py311"), or `path` "" and `why`, which says what to do."""

    path: str = ""
    minor: str = ""
    why: str = ""


def to_dotted(minor: str) -> str:
    """Return `py311` as `3.11`."""
    return f"{minor[2]}.{minor[3:]}"


def check_asked(name: str) -> Found:
    """Check the interpreter that the user named; no other one replaces it."""
    path = shutil.which(name)
    if path is None:
        return Found(why=f"interpreter {name} was not found. Next: --python PATH of one that exists")
    found, reason = _ask(path)
    if found is None:
        return Found(why=f"interpreter {name} {reason}")
    return Found(path, found.minor)


def find_any(minors: Sequence[str], fetch: bool = False) -> Found:
    """Find an interpreter of one of the versions `minors`; the running one comes first. `fetch`: let uv download one if there
    is none."""
    reasons = []
    for path in _candidates(minors):
        found, reason = _ask(path)
        if found is not None and found.minor in minors:
            return found
        if found is None and reason.startswith("has no"):
            reasons.append(f"{path} {reason}")
    if fetch and (path := _fetch(minors[0])):
        found, _ = _ask(path)
        if found is not None:
            return found
    wanted = to_dotted(minors[0])
    if reasons:
        return Found(why=reasons[0])
    return Found(
        why=f"no Python {wanted} was found here. Next: install it (Debian 12: apt-get install python{wanted}-venv; "
        f"any Linux: uv python install {wanted}), or --python PATH of one"
    )


def _ask(path: str) -> tuple[Found | None, str]:
    """Run an interpreter. Returns (what it is, "") or (None, what is wrong with it and what to do)."""
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
    """Yield each interpreter once: the running one, then those on PATH, of Debian, pyenv and uv."""
    seen: set[str] = set()
    for path in _places(minors):
        if path not in seen and os.access(path, os.X_OK):
            seen.add(path)
            yield path


def _places(minors: Sequence[str]) -> Iterator[str]:
    yield getattr(sys, "_base_executable", "") or sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for minor in minors:
        name = f"python{to_dotted(minor)}"
        for folder in [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]:
            yield str(Path(folder) / name)
        yield from (str(path) for path in sorted(pyenv.glob(f"versions/{to_dotted(minor)}*/bin/{name}")))
        yield _uv("find", "--no-project", "--system", to_dotted(minor))


def _fetch(minor: str) -> str:
    """Download an interpreter with uv. Returns its path, "" when there is no uv or it fails."""
    if shutil.which("uv") is None:
        return ""
    print(f"runtime: fetching Python {to_dotted(minor)} with uv", file=sys.stderr, flush=True)
    _uv("install", "--quiet", to_dotted(minor))
    return _uv("find", "--no-project", "--system", to_dotted(minor))


def _uv(*words: str) -> str:
    uv = shutil.which("uv")
    if uv is None:
        return ""
    done = subprocess.run([uv, "python", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
