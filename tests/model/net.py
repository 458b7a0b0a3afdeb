"""A wire that drops, doubles, delays and reorders: what lies between the daemon and its workers and clients.

Owner of: messages under way and who listens where. Invariants: messages are encoded and decoded by the real codecs; without
faults they arrive in order; a daemon that crashed sends and hears nothing more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from artd_schema.codec import Codec
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w

ORDERED_S = 1e-5
SETTLED_S = 1.0  # what hangs on a message that came late has been said and done
Handler = Callable[[bytes, Any, list[bytes]], None]


@dataclass
class Weather:
    """Probabilities, for each message, that it is lost, comes twice, or comes late (and so out of order); late_s: how late
    at most."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    late_s: float = 0.0

    @classmethod
    def storm(cls, rng: random.Random) -> Weather:
        return cls(
            rng.choice((0.0, 0.01, 0.05)), rng.choice((0.0, 0.1)), rng.choice((0.0, 0.1)), rng.choice((0.5, 5.0))
        )


class Side:
    """The daemon's end for one kind of peer: what a `Router` is to it. inbox: what arrived; None while no daemon lives."""

    def __init__(self, net: Net, incoming: Any, outgoing: Any) -> None:
        self._net = net
        self._to_daemon: Codec[Any] = Codec(incoming)
        self._to_peer: Codec[Any] = Codec(outgoing)
        self._peers: dict[bytes, Handler] = {}
        self.inbox: asyncio.Queue[tuple[bytes, Any, list[bytes]]] | None = None

    async def run(self, handler: Handler) -> None:
        """Hear for one daemon, until cancelled."""
        inbox = self.inbox = asyncio.Queue()
        while True:
            handler(*await inbox.get())

    def join(self, peer: bytes, handler: Handler) -> None:
        self._peers[peer] = handler

    def leave(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """From the daemon. Whether the peer is there."""
        if self.inbox is None or peer not in self._peers:
            return False
        frames = self._to_peer.encode(message, bulk)

        def arrive() -> None:
            if listener := self._peers.get(peer):
                listener(peer, *self._to_peer.decode(frames))

        self._net.carry(b"<" + peer, f"{peer.decode()} <- {summary(message)}", arrive)
        return True

    def tell(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> None:
        """To the daemon, whichever lives when it arrives: a socket connects anew."""
        frames = self._to_daemon.encode(message, bulk)

        def arrive() -> None:
            if self.inbox is not None and peer in self._peers:
                self.inbox.put_nowait((peer, *self._to_daemon.decode(frames)))

        self._net.carry(b">" + peer, f"{peer.decode()} -> {summary(message)}", arrive)


class Net:
    """log: told of every arrival and every fault."""

    def __init__(self, rng: random.Random, log: Callable[[str], None]) -> None:
        self._rng = rng
        self._log = log
        self._last: dict[bytes, float] = {}
        self._late_until = 0.0
        self.weather = Weather()
        self.workers = Side(self, w.FromWorker, w.ToWorker)
        self.clients = Side(self, api.Request, api.Reply)

    def carry(self, way: bytes, what: str, arrive: Callable[[], None]) -> None:
        """Have `arrive` called as often and as late as the weather has it."""
        rng, weather, loop = self._rng, self.weather, asyncio.get_running_loop()
        if rng.random() < weather.drop:
            self._log(f"lost     {what}")
            return
        for _ in range(2 if rng.random() < weather.double else 1):
            at = loop.time() + rng.uniform(0.0001, 0.002)
            if rng.random() < weather.late:
                at += rng.uniform(0.0, weather.late_s)
                self._late_until = max(self._late_until, at + SETTLED_S)
            else:
                at = self._last[way] = max(at, self._last.get(way, 0.0) + ORDERED_S)
            loop.call_at(at, self._arrive, what, arrive)

    def _arrive(self, what: str, arrive: Callable[[], None]) -> None:
        self._log(what)
        arrive()

    @property
    def ordered(self) -> bool:
        """Whether what was sent of late has come in its order, as over a socket."""
        return asyncio.get_running_loop().time() > self._late_until

    def close(self) -> None:
        """The daemon is gone."""
        self.workers.inbox = self.clients.inbox = None


def summary(message: Any) -> str:
    """A message in a few words, without anything that differs between two runs of a seed."""
    if isinstance(message, api.Request):
        return f"#{message.id} {summary(message.op)}"
    if isinstance(message, api.Reply):
        return f"#{message.id} {summary(message.answer)}"
    names = (
        "job",
        "fence",
        "push",
        "step",
        "seq",
        "spawn",
        "failure",
        "source",
        "key",
        "group",
        "state",
        "trajectory",
        "code",
    )
    told = (f"{name}={getattr(message, name)}" for name in names if getattr(message, name, None) is not None)
    return " ".join((type(message).__name__, *told))
