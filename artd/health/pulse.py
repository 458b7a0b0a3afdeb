"""Stores the heartbeat of a daemon in the file `pulse` beside its sockets: `heart` writes it, `artctl status` reads it.

Owns that file. The file stays empty, and its two times are the heartbeat (so a full disk does not stop it, and nothing
needs an fsync). The times are CLOCK_MONOTONIC, which every process of this boot of the machine shares.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

FILE = "pulse"
STALE_S = 5.0
"""A loop or writer without a sign of life for so long counts as standing still."""


class Seen(NamedTuple):
    """The seconds since the last signs of life of event loop and writer."""

    loop: float
    writer: float


def write(folder: Path, loop_ns: int, writer_ns: int) -> None:
    """Store when loop and writer last showed a sign of life, by `time.monotonic_ns`. Raises OSError."""
    with open(folder / FILE, "ab") as file:
        os.utime(file.fileno(), ns=(writer_ns, loop_ns))


def read(folder: Path) -> Seen | None:
    """Read the heartbeat in a folder. Returns None if there is none."""
    try:
        times = (folder / FILE).stat()
    except OSError:
        return None
    now = time.monotonic_ns()
    return Seen((now - times.st_mtime_ns) / 1e9, (now - times.st_atime_ns) / 1e9)
