"""Explains why a worker's process ended, in words that an operator can use.

Pure, except that `read_tail` reads the end of a log. It names memory or disk only if the evidence does (exit status,
kernel counter, last lines of the log).
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TAIL_LINES = 40
_TAIL_BYTES = 65536
_MEMORY = re.compile(
    r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|\bOutOfMemoryError\b|CUDA out of memory|can't allocate memory"
)
_BARE = re.compile(r"(ended with exit status \d+|killed by \w+)$")
_DISK = re.compile(r"\bENOSPC\b|No space left|Disk quota exceeded|database or disk is full")

Cause = Literal["", "out of memory", "disk full"]


@dataclass(frozen=True)
class Status:
    """How a process ended. `code` is the exit status of the main child, 128 + n after signal n, negative if the guardian itself
    was killed, None if no process could be made. `text` is one sentence for people."""

    code: int | None
    cause: Cause
    text: str


def read_tail(log: Path, start: int = 0, lines: int = TAIL_LINES) -> str:
    """Return the last lines of `log` after byte `start`, "" if there is no such file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def telling(error: str) -> str:
    """Return the line of a worker's error that says most: its own words, or without any the last line of its log."""
    first, *log = error.strip().splitlines() or [""]
    return log[-1] if log and _BARE.match(first) else first


def signal_of(code: int) -> int:
    """Return the number of the signal that ended the process, 0 if none did."""
    number = -code if code < 0 else code - 128
    return number if number > 0 and number in set(signal.valid_signals()) else 0


def _name(number: int) -> str:
    named = {int(each) for each in signal.Signals}
    return signal.Signals(number).name if number in named else f"signal {number}"


def explain(code: int | None, tail: str, oom_kills: int = 0, why: str = "") -> Status:
    """Explain an exit code and the end of the log.

    `oom_kills` counts the processes that the kernel killed for lack of memory while the worker lived. `why` is what the
    supervisor itself knows (start time-out, order, failed spawn); the text begins with it.
    """
    number = 0 if code is None else signal_of(code)
    if code is None:
        how = "no process could be made"
    elif number:
        how = f"{'its guardian was ' if code < 0 else ''}killed by {_name(number)}"
    else:
        how = f"ended with exit status {code}"
    parts = [why, how] if why else [how]
    cause: Cause = ""
    if not why and number == signal.SIGKILL and oom_kills:
        cause = "out of memory"
        parts.append("out of memory: the kernel ended it; lower the lengths, batch or threads, or add memory")
    elif _MEMORY.search(tail):
        cause = "out of memory"
        parts.append("out of memory: an allocation failed; lower the lengths, batch or threads, or add memory")
    elif _DISK.search(f"{why}\n{tail}"):
        cause = "disk full"
        parts.append("disk full: no space left; make room, it continues by itself")
    return Status(code, cause, "; ".join(parts))
