"""Bytes under way: what clients and the gateway have sent and the daemon has not answered yet.

Owner of: their sum. Invariants: above the limit no further message of a client is read, so that the sender is held back and not
the daemon's memory filled; one message always fits.
"""

from __future__ import annotations

import asyncio

LIMIT = 256 << 20
SHARE = 8
"""One client may have this part of the limit under way, or one message."""


class UnderWay:
    """limit: bytes. `take` what arrived, `give` it back with the answer; both in the event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def window(self) -> int:
        """Bytes that one client should have under way at most."""
        return self.limit // SHARE

    @property
    def full(self) -> bool:
        return self.bytes >= self.limit

    def take(self, size: int) -> None:
        self.bytes += size
        if self.full:
            self._room.clear()

    def give(self, size: int) -> None:
        self.bytes -= size
        if not self.full:
            self._room.set()

    async def room(self) -> None:
        """Return when another message may be read."""
        await self._room.wait()
