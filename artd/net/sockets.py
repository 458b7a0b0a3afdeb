"""The two Unix sockets of a daemon, and the runtime folder that they lie in: made again when somebody has removed them.

Owner of: the runtime folder once the daemon serves. Invariants: what is connected stays connected; where the folder cannot be made
at its old place (the end of a login took `$XDG_RUNTIME_DIR` away) it is made where a new daemon would make it.
"""

from __future__ import annotations

import logging
from typing import Protocol

import zmq

from artd.datadir.layout import DataDir
from artd_schema import paths

from .router import Local

log = logging.getLogger(__name__)


class Bound(Protocol):
    """A router on one of the sockets."""

    def bind_again(self) -> None:
        """See wire.Router."""


class Sockets:
    """data: `runtime` of it follows when the folder moves."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._bound: tuple[Bound, ...] = ()
        self._failed = ""
        self.workers = Local(paths.socket_path(data.runtime, paths.WORKER_SOCKET))
        self.clients = Local(paths.socket_path(data.runtime, paths.CLIENT_SOCKET))

    def watch(self, *bound: Bound) -> None:
        """They listen now."""
        self._bound = bound

    def forget(self) -> None:
        """They are about to close."""
        self._bound = ()

    def mend(self) -> bool:
        """Make again what was removed; whether anything was, and is there again."""
        if not self._bound or not (self.workers.lost() or self.clients.lost()):
            return False
        try:
            self._data.runtime = runtime = paths.runtime_dir(self._data.root)
            self.workers.move(paths.socket_path(runtime, paths.WORKER_SOCKET))
            self.clients.move(paths.socket_path(runtime, paths.CLIENT_SOCKET))
            for bound in self._bound:
                bound.bind_again()
        except (OSError, zmq.ZMQError) as error:
            if str(error) != self._failed:
                log.error("the sockets in %s are gone and cannot be made again: %s", self._data.runtime, error)
            self._failed = str(error)
            return False
        self._failed = ""
        log.warning("the sockets of artd were gone: they are in %s again", runtime)
        return True
