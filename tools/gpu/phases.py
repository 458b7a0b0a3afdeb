"""Where the time of a run goes, told while it goes: a line for each event of the daemon and each change of a worker's state.

Owner of: no state. Invariants: a line is there as soon as the daemon tells of it, so that a run that is cut off says what it was
doing; what cannot be asked is not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from artd_client import ArtdError, Client

Say = Callable[..., None]
_TOLD = ("job", "push", "step", "run", "batch")
_POLL_S = 0.5


async def follow(client: Client, say: Say) -> None:
    """Until cancelled. say(what, **values); each line's seconds count from the one before it."""
    clock = Clock(say)
    await asyncio.gather(_events(client, clock), _workers(client, clock))


class Clock:
    """Seconds since the line before."""

    def __init__(self, say: Say) -> None:
        self._say, self._last = say, time.monotonic()

    def line(self, phase: str, **values: Any) -> None:
        now = time.monotonic()
        self._say("phase", phase=phase, seconds=round(now - self._last, 2), **values)
        self._last = now


async def _events(client: Client, clock: Clock) -> None:
    async for event in client.events():
        if event["kind"].partition(".")[0] in _TOLD:
            clock.line(f"{event['kind']} {event['ref']}", **_figures(event["data"]))


def _figures(data: dict[str, Any]) -> dict[str, Any]:
    """Of an event: its seconds by part, and what is short."""
    told = data.get("seconds")
    parts = {name: round(value, 2) for name, value in (told if isinstance(told, dict) else {"all": told or 0}).items()}
    words = {
        name: data[name] for name in ("job", "step", "source", "transfer", "error", "why", "reason") if data.get(name)
    }
    return words | ({"parts": parts} if told else {})


async def _workers(client: Client, clock: Clock) -> None:
    known: dict[str, str] = {}
    while True:
        try:
            for worker in await client.workers():
                if known.get(worker["name"]) != worker["state"]:
                    known[worker["name"]] = worker["state"]
                    clock.line(f"{worker['name']} {worker['state']}")
        except ArtdError:
            pass  # the next time
        await asyncio.sleep(_POLL_S)
