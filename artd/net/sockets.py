"""Makes the two Unix sockets of a daemon and their runtime folder again when somebody has removed them.

Owns the runtime folder while the daemon serves. Connections stay open. If the folder cannot be made at its old place
(the end of a login removed `$XDG_RUNTIME_DIR`), it is made where a new daemon would make it.
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
        """Listen again, see `Router.bind_again`."""


class Sockets:
    """The sockets of one data folder. It updates `data.runtime` when the runtime folder moves."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._bound: tuple[Bound, ...] = ()
        self._failed = ""
        self.workers = Local(paths.socket_path(data.runtime, paths.WORKER_SOCKET))
        self.clients = Local(paths.socket_path(data.runtime, paths.CLIENT_SOCKET))

    def watch(self, *bound: Bound) -> None:
        """Watch these routers. Call it when they listen."""
        self._bound = bound

    def forget(self) -> None:
        """Stop watching. Call it before the routers close."""
        self._bound = ()

    def mend(self) -> bool:
        """Make removed sockets again. Returns whether a socket was missing and now exists again."""
        if not self._bound or not (self.workers.is_lost() or self.clients.is_lost()):
            return False
        try:
            self._data.runtime = runtime = paths.runtime_dir(self._data.root)
            self.workers.move(paths.socket_path(runtime, paths.WORKER_SOCKET))
            self.clients.move(paths.socket_path(runtime, paths.CLIENT_SOCKET))
            for bound in self._bound:
                bound.bind_again()
        except (OSError, zmq.ZMQError) as error:
            if str(error) != self._failed:
                log.error("the sockets in %s are gone, and artd cannot make them again: %s", self._data.runtime, error)
            self._failed = str(error)
            return False
        self._failed = ""
        log.warning("the sockets of artd were gone: artd made them again in %s", runtime)
        return True
