"""Whether the gateway can have the address that the settings give it: asked once, before anything is started.

Owner of: no state. Invariants: nothing listens here; an address that is lost later is the gateway's own business, which is
started again by the supervisor's policy.
"""

from __future__ import annotations

import socket

from .config import Gateway
from .remote import CannotListen


def require(gateway: Gateway) -> None:
    """Errors: CannotListen. A port that is in use would be so at each of the gateway's five starts."""
    try:
        family, _, _, _, address = socket.getaddrinfo(gateway.host, gateway.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateway's own: TIME_WAIT is no user
            probe.bind(address)
    except OSError as error:
        raise CannotListen(
            f"the gateway cannot listen on {gateway.host} port {gateway.port}: {error.strerror or error}. "
            "Next: choose another gateway.host or gateway.port in artd.toml (port 0 takes any free one)"
        ) from None
