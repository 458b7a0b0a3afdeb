"""A process that looks like a daemon to the command line: `python fake_daemon.py DATA END`.

It holds DATA/artd.lock. END: `polite` ends at the first SIGTERM, `slow` drains until the second, `deaf` runs until it is
killed.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from pathlib import Path

from artd.datadir import folder, lock
from artd_schema import paths


def main(data: Path, end: str) -> int:
    folder.take(data)
    handle = lock.acquire(data, "9.9.9", 0.2)
    me = lock.describe("9.9.9", 0.2)
    seen = 0

    def terminate(_number: int, _frame: object) -> None:
        nonlocal seen
        seen += 1

    signal.signal(signal.SIGTERM, terminate)
    paths.write_daemon_file(data, dataclasses.replace(me, state="ready", url="http://127.0.0.1:1"))
    print("ready", flush=True)
    while end == "deaf" or seen < (1 if end == "polite" else 2):
        if seen:
            paths.write_daemon_file(data, dataclasses.replace(me, state="draining"))
        time.sleep(0.01)
    return 0 if handle else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
