"""Connections that say nothing, by the hundred, and a daemon under a low limit of open files.

Owner of: the sockets of a `Crowd`. Invariants: this process may have as many files as the hard limit allows.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.daemon.rig import Rig

SHUT = (errno.ENOENT, errno.ECONNREFUSED)


def limited(files: int) -> list[str]:
    """A command that runs what follows it with a hard limit of so many open files."""
    return ["/bin/sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def many_files() -> None:
    """Let this process have as many as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def crowd(family: int, address: Any, count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """Up to `count` connections to `address`, made at once, each of which says `says` and no more; those that the kernel took."""
    many_files()
    made = []
    try:
        for _ in range(count):
            one = socket.socket(family, socket.SOCK_STREAM)
            one.setblocking(
                family == socket.AF_UNIX or bool(says)
            )  # there a full backlog is waited for, else the handshake would be
            try:
                one.connect(address)
            except BlockingIOError:
                pass
            except OSError as error:
                one.close()
                if error.errno not in SHUT:
                    raise
                continue
            made.append(one)
            if says:
                with contextlib.suppress(OSError):
                    one.send(says)
        yield made
    finally:
        for one in made:
            one.close()


def lives(rig: Rig) -> None:
    assert rig.process is not None and rig.process.poll() is None, rig.log()
