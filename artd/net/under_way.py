"""Counts bytes under way: messages that clients and the gateway have sent and the daemon has not answered yet.

Owns their sum. Above the limit the daemon reads no further message of a client, so that the sender waits and the
daemon's memory does not fill. One message always fits.
"""

from __future__ import annotations

import asyncio

LIMIT = 256 << 20
SHARE = 8
"""One client may have `limit // SHARE` bytes under way, or one message."""


class UnderWay:
    """A counter with a limit in bytes. `take` adds a message that arrived, `give` subtracts it with its answer. The event loop
    calls both."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def window(self) -> int:
        """The most bytes that one client should have under way."""
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
