"""Tells the service manager that started the daemon (systemd's sd_notify) that it is ready, alive or stopping.

Without `$NOTIFY_SOCKET` it sends nothing. It ignores a manager that does not listen.
"""

from __future__ import annotations

import contextlib
import os
import socket


def say(word: str) -> None:
    """Send one datagram such as `READY=1`."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        out.sendto(word.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def alive() -> None:
    """Tell the manager that the event loop runs, if `$WATCHDOG_USEC` asks for it. A hanging disk does not stop these messages,
    because killing the daemon would not mend the disk."""
    if os.environ.get("WATCHDOG_USEC") and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        say("WATCHDOG=1")
