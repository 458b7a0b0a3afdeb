"""Serves clients on other machines by TCP, encrypted and authenticated by CURVE, for allow-listed keys only.

There is no TCP endpoint without CURVE. A key is valid from the moment that it is allowed until one second after it is
removed; the removal applies to open connections too. A failed look-up of one key never prevents the look-up of the
next. An answer goes to the socket that its request came from.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket as sockets
import struct
import time
from collections.abc import Callable, Sequence

import anyio
import zmq
import zmq.asyncio
from zmq.auth import Authenticator

from artd_schema.codec import Codec
from artd_schema.wire import client_api as api

from .descriptors import Watch
from .keys import Keys
from .router import Local, Refuse, Router
from .under_way import UnderWay

log = logging.getLogger(__name__)
MARK = b"tcp:"
WAITING = 8
"""Messages of one client that ZeroMQ queues while the daemon reads none; `UnderWay` does not count their bytes."""
HANDSHAKE_MS = 3000
"""The daemon disconnects a client that has not shown an allowed key by then."""
PEERS = 4096
LOOK_S = 1.0
"""A removed key stays valid for no longer than this."""
HEARTBEAT_MS, SILENT_MS = 15_000, 45_000
KEEPALIVE_S = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 15, zmq.TCP_KEEPALIVE_CNT: 4}
ATTACH_FILTER, DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of <asm-generic/socket.h>
DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF: return 0
"""A classic BPF program for a socket. On a listening socket it drops every SYN, so that the client tries again later."""
Ask = Callable[[bytes, api.Request, list[bytes], int], None]
"""A handler of (peer, request, bulk, bytes of the request's header)."""


class CannotListen(Exception):
    """The daemon cannot listen at a TCP address; the text names the setting."""


class Curve:
    """An endpoint of `router.Router` on TCP. `address` is for example `tcp://0.0.0.0:7440`.

    A filter in the kernel shuts it, because ZeroMQ drops every connection when it unbinds.
    """

    share = 0.75

    def __init__(self, address: str, keys: Keys) -> None:
        self.address = address
        self._keys = keys
        self._authenticator: Authenticator | None = None
        self._listener: sockets.socket | None = None
        self._names: dict[str, tuple[str, float]] = {}  # by key of a client: its name, and until when that is valid
        self._peers: dict[bytes, str] = {}

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Start the authenticator, and bind the socket with CURVE. Raises CannotListen, BadKey."""
        public, secret = self._keys.server()
        self._authenticator = Authenticator(socket.context)
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.start()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        for option, value in KEEPALIVE_S.items():
            socket.setsockopt(option, value)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            raise CannotListen(f"remote.bind = {self.address!r}: {error}. Next: choose another in artd.toml") from None
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Answer ZeroMQ's questions about keys until cancelled."""
        assert self._authenticator is not None
        questions = self._authenticator.zap_socket
        poller = zmq.asyncio.Poller()
        poller.register(questions, zmq.POLLIN)
        while True:
            await poller.poll()
            question = questions.recv_multipart()
            try:
                await self._authenticator.handle_zap_message(question)
            except Exception:
                log.exception("refused a client: the look-up of its key failed")
                with contextlib.suppress(zmq.ZMQError):  # the authenticator answered before it failed
                    questions.send_multipart([b"1.0", question[1], b"500", b"the daemon failed", b"", b""])

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether this public key may connect. The authenticator calls this."""
        try:
            allowed = self._keys.allowed(key)
        except Exception as error:  # for example no descriptor is left; the next look-up may succeed
            log.error("refused key %s: cannot read the allowed keys: %s", key.decode(errors="replace"), error)
            return False
        if not allowed:
            log.warning("refused a client with key %s; `artctl key add` allows one", key.decode(errors="replace"))
        return allowed

    def admit(self, peer: bytes, key: str) -> bool:
        """Return whether the key of a connection is still allowed. It looks the key up once a second."""
        now = time.monotonic()
        name, until = self._names.get(key, ("", 0.0))
        if now >= until:
            try:
                name = self._keys.name(key.encode())
            except OSError as error:
                log.error("cannot read the allowed keys, so connected clients stay allowed: %s", error)
                name = "" if self._keys.is_removed(name) else name
            self._names[key] = (name, now + LOOK_S)
        if len(self._peers) >= PEERS and peer not in self._peers:
            del self._peers[next(iter(self._peers))]
        self._peers[peer] = name
        return bool(name)

    def who(self, peer: bytes) -> str:
        """Return the name of the key by which a peer connected, "" for an unknown peer."""
        return self._peers.get(peer, "")

    # ---- door ---------------------------------------------------------------------------------------------------------

    def set_listener(self, descriptor: int) -> None:
        self._listener = sockets.socket(fileno=os.dup(descriptor))

    def shut(self) -> None:
        assert self._listener is not None
        program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
        pointer = struct.pack("@HP", 1, ctypes.addressof(program))
        try:
            self._listener.setsockopt(sockets.SOL_SOCKET, ATTACH_FILTER, pointer)
        except OSError as error:
            log.error("cannot shut %s, so it stays open to further connections: %s", self.address, error)

    def open(self) -> None:
        assert self._listener is not None
        try:
            self._listener.setsockopt(sockets.SOL_SOCKET, DETACH_FILTER, 0)
        except OSError as error:
            log.debug("%s had no filter: %s", self.address, error)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._listener is not None:
            self._listener.close()


class ClientWire:
    """All sockets for clients: the Unix socket `local`, and TCP at `bind` unless that is empty."""

    def __init__(
        self, local: Local, bind: str, keys: Keys, max_message: int, ask: Ask, refuse: Refuse,
        under_way: UnderWay | None = None,
    ) -> None:  # fmt: skip
        codec: Codec[api.Request] = Codec(api.Request)
        self._curve: Curve | None = None
        self._watch: Watch | None = None
        self._local: Router[api.Request] = Router(
            local,
            codec,
            max_message,
            lambda peer, request, bulk: ask(peer, request, bulk, self._local.header),
            refuse,
            under_way,
            WAITING,
        )
        self._remote: Router[api.Request] | None = None
        if bind:
            self._curve = Curve(bind, keys)
            self._remote = far = Router(
                self._curve, codec, max_message,
                lambda peer, request, bulk: ask(MARK + peer, request, bulk, far.header),
                lambda peer, *request: refuse(MARK + peer, *request), under_way, WAITING, self._curve.admit,
            )  # fmt: skip

    @property
    def endpoint(self) -> str:
        """The address of the Unix socket."""
        return self._local.endpoint

    def bind(self, files: int) -> None:
        """Bind all sockets. `files` is the limit of open files of this process. Raises CannotListen, keys.BadKey."""
        self._watch = Watch(files)
        for router in self._routers:
            router.bind(self._watch)
        self._watch.start()
        if self._remote is not None:
            log.info("listening for clients of other machines at %s", self._remote.endpoint)

    def bind_again(self) -> None:
        """Bind the Unix socket again, see `Router.bind_again`. Nobody can remove a TCP port."""
        self._local.bind_again()

    async def run(self) -> None:
        """Receive until cancelled."""
        async with anyio.create_task_group() as group:
            for router in self._routers:
                group.start_soon(router.run)
            if self._curve is not None:
                group.start_soon(self._curve.run)

    def who(self, peer: bytes) -> str:
        """Return `key NAME` for a client of another machine, "" for one of this machine. `peer` is as `ask` got it."""
        if self._curve is None or not peer.startswith(MARK):
            return ""
        return f"key {self._curve.who(peer[len(MARK) :])}"

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """Send a message, see `Router.send`. `peer` is as `ask` got it."""
        if peer.startswith(MARK):
            return self._remote is not None and self._remote.send(peer[len(MARK) :], message, bulk)
        return self._local.send(peer, message, bulk)

    def close(self) -> None:
        for router in self._routers:
            router.close()
        if self._watch is not None:
            self._watch.join()

    @property
    def _routers(self) -> list[Router[api.Request]]:
        return [self._local, *([self._remote] if self._remote else [])]
