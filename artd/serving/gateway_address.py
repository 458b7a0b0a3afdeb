"""Opens the gateway's listening socket. The daemon holds it for life, and each gateway process inherits it.

Owns that socket. The address outlives every gateway process, so clients keep their address when a gateway crashes, and
what they send meanwhile waits in the socket's queue. If the configuration allows any free port, the daemon takes that
of the last boot again where it can.
"""

from __future__ import annotations

import errno
import logging
import socket

from artd.config import Gateway
from artd.net.remote import CannotListen

log = logging.getLogger(__name__)
BACKLOG = 2048


def listen(gateway: Gateway, before: int) -> socket.socket:
    """Open the socket. `before` is the port of the last boot, 0 for none. Raises CannotListen: a port that is in use
    now would fail at every start of a gateway, too."""
    try:
        family, _, _, _, address = socket.getaddrinfo(gateway.host, gateway.port, type=socket.SOCK_STREAM)[0]
        if not gateway.port and before:
            try:
                return _listener(family, address[0], before)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                log.warning(
                    "port %d of the gateway is in use by another program now: the gateway gets another port", before
                )
        return _listener(family, address[0], gateway.port)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # the rest is the address, which our text has
        raise CannotListen(
            f"the gateway cannot listen on {gateway.host} port {gateway.port}: {why}. "
            "Next: choose another gateway.host or gateway.port in artd.toml (port 0 takes any free one)"
        ) from None


def _listener(family: int, host: object, port: int) -> socket.socket:
    made = socket.create_server((str(host), port), family=family, backlog=BACKLOG)
    made.setblocking(False)
    return made
