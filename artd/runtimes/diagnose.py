"""Turns pip's output, and what this machine lacks, into one sentence that says what is missing, where, and what to do next. It
only reads."""

import re
import shutil
import subprocess
from pathlib import Path

from artd_schema.run.engines import ENGINES

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEADROOM = 1.15

# Unpacked bytes of a runtime, seen on Linux x86_64; used for the disk check before anything is fetched.
NEEDED_BYTES = {"megatron-cpu": 2_000_000_000, "megatron-test-overlay": 30_000_000} | {
    f"{engine.runtime}-{device}": size for engine in ENGINES.values() for device, size in engine.runtime_bytes.items()
}

_PATTERNS: list[tuple[str, str]] = [
    (
        r"No space left on device|Errno 28",
        "the disk is full. Next: free space there, or set XDG_DATA_HOME to another disk",
    ),
    (
        r"Python\.h: No such file",
        "the Python headers (Python.h) are missing. Next: install your Python's -dev package (Debian: python3-dev)",
    ),
    (
        r"(?:command|unable to execute) '?\S*(?:cc|\+\+|clang)\S*'?(?: failed)?:? .*No such file",
        "no C++ compiler was found. Next: install one (Debian: g++)",
    ),
    (
        r"No matching distribution found for (?P<what>\S+)",
        "no registry in pip's configuration has {what} for this Python and platform. Next: add an index or a folder "
        "that has it (--index URL or --find-links DIR; CPU builds of torch: --index " + TORCH_CPU_INDEX + ")",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|Connection refused|Network is unreachable|"
        r"Max retries exceeded|ConnectTimeout|ProxyError|NewConnectionError",
        "the package registry could not be reached. Next: check the network, or point pip at a mirror "
        "(pip config set global.index-url URL, --index URL or --find-links DIR)",
    ),
    (r"THESE PACKAGES DO NOT MATCH THE HASHES", "a download was damaged. Next: run the command again"),
    (r"MemoryError|Killed", "the machine ran out of memory. Next: free memory and run the command again"),
]


def find_cause(log: str) -> str:
    """Return one sentence for the first known cause in pip's output. "No matching" after failed connections is the network's
    fault."""
    network = next(text for pattern, text in _PATTERNS if pattern.startswith("Temporary"))
    for pattern, text in _PATTERNS:
        match = re.search(pattern, log)
        if match is None:
            continue
        if "what" in match.groupdict():
            if re.search(r"Retrying \(.*connection broken", log):
                return network
            return text.replace("{what}", match["what"])
        return text
    return "pip failed"


def compiler() -> str | None:
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def headers(python: str) -> Path | None:
    """Return the path of Python.h that an interpreter would use, None when it is absent."""
    code = "import sysconfig; print(sysconfig.get_paths()['include'])"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    path = Path(done.stdout.strip() or "/nonexistent") / "Python.h"
    return path if path.is_file() else None


def disk_shortage(stem: str, folder: Path) -> str | None:
    """Return why the disk cannot hold the runtime, None when it can."""
    where = folder
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    needed = int(NEEDED_BYTES.get(stem, 0) * HEADROOM)
    if free >= needed:
        return None
    return (
        f"{stem} needs {needed / 1e9:.1f} GB at {folder} and {free / 1e9:.1f} GB are free. "
        "Next: free space there, or set XDG_DATA_HOME to another disk"
    )
