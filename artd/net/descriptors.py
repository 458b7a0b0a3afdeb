"""Limits file descriptors: how many the process may open, how many it reserves for itself, and when a client must wait.

Owns the process's soft limit, and the thread that watches the sockets for clients. libzmq aborts the process when
accept() on a Unix socket fails with EMFILE, so this module shuts an endpoint before the process runs out of
descriptors. A shut endpoint keeps its connections, and opens again as soon as enough descriptors are free.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)
NEEDED = 256
"""With a lower limit there is no room for clients beside the daemon's own files, workers and database."""
AMPLE = 4096
"""With a lower limit, about a thousand rollout processes may not find room."""
SCARCE = (errno.EMFILE, errno.ENFILE)
LOOK_MS = 50
SAY_S = 10.0
EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED


class TooFew(Exception):
    """The limit of open files is too low to run a daemon; the text has the number and what to do."""


def is_scarce(error: BaseException | None) -> bool:
    """Return whether an error says that no descriptors are left, which is a passing state."""
    return isinstance(error, OSError) and error.errno in SCARCE


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns the limit that holds now. Raises TooFew if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError) as error:  # for example a hard limit above fs.nr_open
        log.warning("the limit of open files stays at %d: %s", soft, error)
    if soft < NEEDED:
        raise TooFew(
            f"this process may open {soft} files, and artd needs {NEEDED}. Next: `ulimit -Hn` shows the hard limit; raise it "
            "(limits.conf, or LimitNOFILE= of its service)"
        )
    return soft


def in_use(limit: int) -> int:
    """Return the number of open descriptors of this process, or `limit` when none is left to count them with."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if not is_scarce(error):
            raise
        return limit


def reserve(limit: int) -> int:
    """Return how many descriptors clients do not get.

    The process needs them for files and workers, and for clients that connect before the watch looks: some hundreds when a
    crowd connects at once.
    """
    return min(3 * limit // 4, 320 + limit // 8, 4096)


class Door(Protocol):
    """Lets new connections into a listening socket. Both calls are idempotent and may come from any thread."""

    def shut(self) -> None:
        """Let no further connection in."""

    def open(self) -> None:
        """Let connections in again."""


@dataclass(eq=False)
class _Watched:
    door: Door
    monitor: zmq.Socket[bytes]
    high: int
    low: int
    shut: bool = False


class Watch:
    """Shuts doors while the process has too few descriptors left. `limit` is the result of `raise_limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._said = 0.0
        self._doors: list[_Watched] = []
        self._thread = threading.Thread(target=self._run, name="artd-descriptors", daemon=True)

    def add(self, door: Door, monitor: zmq.Socket[bytes], share: float) -> None:
        """Watch a door. Call it before `start`.

        `monitor` is the monitor of the listening socket, with EVENTS. The door shuts when clients use `share` of the descriptors
        for clients; a door that strangers reach has a share below 1.
        """
        free = self._limit - reserve(self._limit) - in_use(self._limit)
        high = in_use(self._limit) + int(share * free)
        self._doors.append(_Watched(door, monitor, high, high - max(8, free // 16)))

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end. Call it after the sockets have stopped their monitors."""
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        self._used = in_use(self._limit)
        left = list(self._doors)
        while left:
            waiting = any(watched.shut for watched in left)
            try:
                zmq.zmq_poll([(watched.monitor, zmq.POLLIN) for watched in left], LOOK_MS if waiting else -1)
            except zmq.ContextTerminated:
                log.debug("a socket is being closed")
            left = [watched for watched in left if self._read(watched)]
            self._judge(left, recount=waiting)

    def _read(self, watched: _Watched) -> bool:
        """Count accepted connections. Returns False when the monitor has ended."""
        try:
            while watched.monitor.poll(0):
                event = recv_monitor_message(watched.monitor)["event"]
                if event == zmq.EVENT_MONITOR_STOPPED:
                    break
                self._used += event == zmq.EVENT_ACCEPTED
                if self._used >= watched.high and not watched.shut:
                    return True  # shut the door first, then read the remaining events
            else:
                return True
        except zmq.ContextTerminated:
            log.debug("a socket was closed")
        watched.monitor.close(0)
        return False

    def _judge(self, doors: list[_Watched], recount: bool) -> None:
        if recount or any(self._used >= watched.high for watched in doors):
            self._used = in_use(self._limit)  # no event reports a connection that ended
        for watched in doors:
            if not watched.shut and self._used >= watched.high:
                watched.door.shut()
                watched.shut = True
                self._say()
            elif watched.shut and self._used < watched.low:
                watched.door.open()
                watched.shut = False

    def _say(self) -> None:
        if time.monotonic() - self._said < SAY_S:
            return
        self._said = time.monotonic()
        log.warning(
            "%d of %d files are open: further clients wait until others disconnect. Next: run fewer clients, or raise the hard "
            "limit of open files (`artd doctor` shows it)",
            self._used, self._limit,
        )  # fmt: skip
