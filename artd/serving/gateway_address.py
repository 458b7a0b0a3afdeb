"""The gateway's listening socket: the daemon holds it for life, and each gateway process inherits it.

Owner of: that socket. Invariants: the address outlives every gateway process, so clients in the field go on after its crash (what they
send meanwhile waits in the socket's queue); of any free ports the one of the last boot is taken again where it can be had.
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
    """before: the port of the last boot, 0: none. Errors: CannotListen. A port that is in use would be so at each of the gateway's
    five starts."""
    try:
        family, _, _, _, address = socket.getaddrinfo(gateway.host, gateway.port, type=socket.SOCK_STREAM)[0]
        if not gateway.port and before:
            try:
                return _listener(family, address[0], before)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                log.warning("port %d of the gateway has been taken meanwhile: it gets another", before)
        return _listener(family, address[0], gateway.port)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # what create_server adds is said already
        raise CannotListen(
            f"the gateway cannot listen on {gateway.host} port {gateway.port}: {why}. "
            "Next: choose another gateway.host or gateway.port in artd.toml (port 0 takes any free one)"
        ) from None


def _listener(family: int, host: object, port: int) -> socket.socket:
    made = socket.create_server((str(host), port), family=family, backlog=BACKLOG)
    made.setblocking(False)
    return made
