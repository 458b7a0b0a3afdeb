"""Keeps a CPU free for the tests beside a real engine.

On two CPUs vLLM uses both as long as it has a request. Busy loops beside it got 2 % each, and a test ran too late to see the
request in flight.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def leave_a_cpu(pids: Iterable[int]) -> None:
    """Keep the threads that these processes have off the first CPU, where there is another."""
    first, *others = sorted(os.sched_getaffinity(0))
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*")]
    for thread in threads:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), others or [first])
