"""Limits how long the gateway waits for a request, and for how many connections at a time.

A connection waits until it has sent a whole request head with the right token. It is dropped after `Limits.head_s`. When more than
`Limits.heads` wait, the oldest of the address that has the most is dropped after `GRACE_S`. So whoever holds connections without a token
takes the place of nobody who has one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from artd_workers.gateway.limits import Limits

REFUSED = "artd.refused"
"""In the ASGI scope of a request without the right token."""
GRACE_S = 0.5
"""Younger connections are not dropped for others: many that queued while the gateway was busy, or not there, are accepted in one
turn of the event loop, before it reads what they have sent."""
OWN_FILES = 128
"""Descriptors that connections do not get: the link, engines, logs."""


def most_connections() -> int:
    """How many connections fit into this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - OWN_FILES, 32)


class Crowd:
    """All connections of one gateway. most: how many there may be; one address beyond loopback may have half of them."""

    def __init__(self, limits: Limits, most: int) -> None:
        self.limits = limits
        self.most = most
        self._of: Counter[str] = Counter()
        self._waiting: dict[PatientProtocol, float] = {}  # since when

    def enter(self, who: PatientProtocol) -> bool:
        """Count a new connection. Returns whether there is a place for it."""
        if sum(self._of.values()) >= self.most and self._waiting:
            self._oldest_of_the_most().drop()
        full = sum(self._of.values()) >= self.most
        greedy = self._of[who.address] >= self.most // 2 and not _is_loopback(who.address)
        self._of[who.address] += 1
        return not full and not greedy

    def leave(self, who: PatientProtocol) -> None:
        self._of -= Counter([who.address])

    def wait(self, who: PatientProtocol) -> None:
        """Note that a connection has to send a request now."""
        now = who.loop.time()
        while len(self._waiting) >= self.limits.heads:
            oldest = self._oldest_of_the_most()
            if now - self._waiting[oldest] < GRACE_S:
                break
            oldest.drop()
        self._waiting[who] = now

    def end_wait(self, who: PatientProtocol) -> None:
        self._waiting.pop(who, None)

    def _oldest_of_the_most(self) -> PatientProtocol:
        """Return the connection that has waited longest, of the address with the most that wait."""
        (address, _), *_ = Counter(who.address for who in self._waiting).most_common(1)
        return next(who for who in self._waiting if who.address == address)


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with the deadline for heads that it does not have."""

    def __init__(self, *args: Any, crowd: Crowd, **named: Any) -> None:
        super().__init__(*args, **named)
        self._crowd = crowd
        self._deadline: asyncio.TimerHandle | None = None
        self._inside = False
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._inside = True
        if not self._crowd.enter(self):
            self.drop()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._go()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._under_way():
            self._wait()  # the first bytes of a further request, if it has not waited already
        super().data_received(data)
        if self._under_way():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        refused = self.cycle.scope.get(REFUSED)
        super().on_response_complete()
        if refused and not self._under_way():
            self._wait()

    def drop(self) -> None:
        """End the connection now."""
        self._stop_waiting()
        self._go()
        self.transport.abort()

    def _under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._crowd.wait(self)
            self._deadline = self.loop.call_later(self._crowd.limits.head_s, self.drop)

    def _stop_waiting(self) -> None:
        self._crowd.end_wait(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _go(self) -> None:
        if self._inside:
            self._inside = False
            self._crowd.leave(self)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a Unix socket has none
        return True
