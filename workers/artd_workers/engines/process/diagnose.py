"""Finds out why a server ended, from its last log lines; it names a full disk and lack of memory. `Down` carries the text."""

from __future__ import annotations

import re
import signal
from pathlib import Path

TAIL_LINES = 40
_TAIL_BYTES = 64 << 10
_SEARCH_BYTES = 4 << 20
_ERROR_CHARS = 400
_EXCEPTION = re.compile(
    r"^(?:\([^)]*\) ERROR [^\]]*\] )?((?:[\w.]*\.)?\w*(?:Error|Exception|Interrupt): .+)$", re.MULTILINE
)
_DISK = ("No space left on device", "ENOSPC", "Disk quota exceeded")
_MEMORY = (
    "Cannot allocate memory",
    "not enough memory",
    "MemoryError",
    "std::bad_alloc",
    "out of memory",
    "is less than requested memory",
    "is less than desired CPU memory",
)


def tail(log: Path, offset: int = 0, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log that were written at byte `offset` or later."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            start = max(offset, end - _TAIL_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def first_error(log: Path, offset: int = 0) -> str:
    """Return the first exception in a log at byte `offset` or later, such as `RuntimeError: no`, "" when there is none.

    The last lines of a dying server may be its API server's, three processes away from the cause.
    """
    try:
        with log.open("rb") as file:
            file.seek(offset)
            text = file.read(_SEARCH_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    found = _EXCEPTION.search(text)
    return found[1][:_ERROR_CHARS] if found else ""


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended in this cgroup, 0 where that cannot be read."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line[3:] for line in groups if line.startswith("0::"))
        events = Path("/sys/fs/cgroup" + path, "memory.events").read_text()
    except (OSError, StopIteration):
        return 0
    return sum(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))


def cause(returncode: int, text: str, oom_killed: bool, lost: str = "") -> str:
    """Return one sentence: how the server ended and, where it is known, why.

    `returncode`: as of Popen; `oom_killed`: the kernel's out-of-memory killer was at work; `lost`: why artd itself ended the
    server.
    """
    if any(word in text for word in _DISK):
        return "the disk is full (no space left on device): free space, then artd starts the engine again"
    if oom_killed or any(word in text for word in _MEMORY):
        return "out of memory: lower engine.kv_cache_mib, engine.max_num_seqs or engine.max_model_len of the run, or free memory"
    if lost:
        return lost
    if returncode == -signal.SIGKILL:
        return "killed by signal 9 from outside; most often that is the kernel's out-of-memory killer (see dmesg)"
    if returncode < 0:
        return f"ended by signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"ended with exit code {returncode}"
