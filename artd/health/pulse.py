"""The heartbeat of a daemon as a file, `pulse` beside its sockets: who writes it is `heart`, who reads it `artctl status`.

Owner of: that file. Invariants: it stays empty, its two times are the heartbeat (so that a full disk does not stop it, and nothing is
fsynced); they are CLOCK_MONOTONIC, which every process of this boot of the machine shares.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

FILE = "pulse"
STALE_S = 5.0
"""Without a sign of life for so long, loop or writer counts as standing still."""


class Seen(NamedTuple):
    """Seconds since the last sign of life of event loop and writer."""

    loop: float
    writer: float


def write(folder: Path, loop_ns: int, writer_ns: int) -> None:
    """Tell when loop and writer were last seen alive, by `time.monotonic_ns`. Errors: OSError."""
    with open(folder / FILE, "ab") as file:
        os.utime(file.fileno(), ns=(writer_ns, loop_ns))


def seen(folder: Path) -> Seen | None:
    """What the heartbeat in this folder says now; None when there is none."""
    try:
        told = (folder / FILE).stat()
    except OSError:
        return None
    now = time.monotonic_ns()
    return Seen((now - told.st_mtime_ns) / 1e9, (now - told.st_atime_ns) / 1e9)
