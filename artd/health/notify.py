"""Words for the service manager that started the daemon (systemd's sd_notify): ready, alive, stopping.

Owner of: no state. Invariants: without `$NOTIFY_SOCKET` nothing is said; a manager that does not listen is no fault of the daemon's.
"""

from __future__ import annotations

import contextlib
import os
import socket


def say(word: str) -> None:
    """One datagram such as `READY=1`."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        out.sendto(word.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def alive() -> None:
    """The event loop runs: asked for by `$WATCHDOG_USEC`. A disk that hangs is none of it: killing the daemon would mend nothing."""
    if os.environ.get("WATCHDOG_USEC") and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        say("WATCHDOG=1")
