"""Clients on other machines: TCP, encrypted and authenticated by CURVE, for allow-listed keys only.

Owner of: nothing on disk (`keys` is). Invariants: there is no TCP endpoint without CURVE; a key counts from the moment that
it is allowed to the moment that it is removed, for connections made between; an answer goes to the socket that its
question came from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from artd_schema import client_api as api
from artd_schema.codec import Codec

from .keys import Keys
from .wire import Local, Refuse, Router

log = logging.getLogger(__name__)
MARK = b"tcp:"
Ask = Callable[[bytes, api.Request, list[bytes]], None]


class CannotListen(Exception):
    """A TCP address cannot be had; the text names the setting."""


class Curve:
    """An endpoint of `wire.Router` on TCP. address: such as `tcp://0.0.0.0:7440`."""

    def __init__(self, address: str, keys: Keys) -> None:
        self.address = address
        self._keys = keys
        self._authenticator: AsyncioAuthenticator | None = None

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Errors: CannotListen, BadKey."""
        public, secret = self._keys.server()
        self._authenticator = AsyncioAuthenticator(socket.context)
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.start()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            raise CannotListen(f"remote.bind = {self.address!r}: {error}. Next: choose another in artd.toml") from None
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def callback(self, _domain: str, key: bytes) -> bool:
        """The authenticator's question: may this public key connect?"""
        if allowed := self._keys.allowed(key):
            return allowed
        log.warning("a client with key %s was refused; `artctl key add` allows one", key.decode(errors="replace"))
        return False

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()


class ClientWire:
    """Every socket for clients: the Unix socket at `path`, and TCP at `bind` unless that is empty."""

    def __init__(self, path: Path, bind: str, keys: Keys, max_message: int, ask: Ask, refuse: Refuse) -> None:
        codec: Codec[api.Request] = Codec(api.Request)
        self._local = Router(Local(path), codec, max_message, ask, refuse)
        self._remote: Router[api.Request] | None = None
        if bind:
            self._remote = Router(
                Curve(bind, keys), codec, max_message,
                lambda peer, *request: ask(MARK + peer, *request),
                lambda peer, *request: refuse(MARK + peer, *request),
            )  # fmt: skip

    @property
    def endpoint(self) -> str:
        """Of the Unix socket."""
        return self._local.endpoint

    def bind(self) -> None:
        """Errors: CannotListen, keys.BadKey."""
        for router in self._routers:
            router.bind()
        if self._remote is not None:
            log.info("clients of other machines: %s", self._remote.endpoint)

    async def run(self) -> None:
        """Receive until cancelled."""
        async with anyio.create_task_group() as group:
            for router in self._routers:
                group.start_soon(router.run)

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """See wire.Router.send; peer: as `ask` got it."""
        if peer.startswith(MARK):
            return self._remote is not None and self._remote.send(peer[len(MARK) :], message, bulk)
        return self._local.send(peer, message, bulk)

    def close(self) -> None:
        for router in self._routers:
            router.close()

    @property
    def _routers(self) -> list[Router[api.Request]]:
        return [self._local, *([self._remote] if self._remote else [])]
