"""`python -m tests.daemon.remote PYTHON -m artd.cli.main start ...`: a daemon that cannot kill.

It ends its workers like processes on an unreachable machine: it reports that it has, and leaves them alone. Leftovers of older
boots survive its signals too, like processes that hang in the kernel. Give it to `Rig.start` as the command that runs the
daemon. Everything else is the real daemon; its guardians end the abandoned processes when it dies.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from artd import daemon
from artd.cli import main
from artd.supervise import procfs, worker
from artd.supervise.spawn import Child, spawn

KILLED = 137
REAP_S = 0.3


class Remote:
    """A Child that `kill` does not touch."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    async def kill(self) -> int:
        """Say that it is dead; it is so only when it ended by itself."""
        return await self._child.kill() if self._child.exited else KILLED


if __name__ == "__main__":
    patches: list[tuple[Any, str, Any]] = [
        (worker, "spawn", lambda *args, **more: Remote(spawn(*args, **more))),
        (procfs, "strike", lambda *_: None),
        (daemon, "reap", functools.partial(daemon.reap, within_s=REAP_S)),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
    sys.exit(main.main(sys.argv[sys.argv.index("start") :]))
