"""Clients on other machines: TCP, encrypted and authenticated by CURVE, for allow-listed keys only.

Owner of: nothing on disk (`keys` is). Invariants: there is no TCP endpoint without CURVE; a key counts from the moment that
it is allowed to a second after it is removed, for connections made between, too; whatever happens in the look-up of a key, the
next one is looked up; an answer goes to the socket that its question came from.
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

from artd_schema import client_api as api
from artd_schema.codec import Codec

from .descriptors import Watch
from .keys import Keys
from .router import Local, Refuse, Router
from .under_way import UnderWay

log = logging.getLogger(__name__)
MARK = b"tcp:"
WAITING = 8
"""Messages of one client that ZeroMQ holds while none is read; they are not among the bytes under way."""
HANDSHAKE_MS = 3000
"""Who has not shown an allowed key by then is disconnected: until it has, a connection is a stranger's."""
PEERS = 4096
LOOK_S = 1.0
"""A key that was removed counts for no longer than this."""
HEARTBEAT_MS, SILENT_MS = 15_000, 45_000
KEEPALIVE_S = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 15, zmq.TCP_KEEPALIVE_CNT: 4}
ATTACH_FILTER, DETACH_FILTER = 26, 27  # SO_*, of <asm-generic/socket.h>
DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF: return 0
""" A classic BPF program for a socket. On a listening one it drops every SYN, so that who connects tries again."""
Ask = Callable[[bytes, api.Request, list[bytes], int], None]
"""peer, request, bulk, bytes of the header that the request came in."""


class CannotListen(Exception):
    """A TCP address cannot be had; the text names the setting."""


class Curve:
    """An endpoint of `wire.Router` on TCP. address: such as `tcp://0.0.0.0:7440`. It is shut by a filter of the kernel, since ZeroMQ
    drops every connection when it unbinds."""

    share = 0.75

    def __init__(self, address: str, keys: Keys) -> None:
        self.address = address
        self._keys = keys
        self._authenticator: Authenticator | None = None
        self._listener: sockets.socket | None = None
        self._names: dict[str, tuple[str, float]] = {}  # by key, of those that had connected
        self._peers: dict[bytes, str] = {}

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Errors: CannotListen, BadKey."""
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
        """Answer the questions for keys, until cancelled."""
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
                log.exception("a client was refused: the question for its key could not be answered")
                with contextlib.suppress(zmq.ZMQError):  # it had answered before it failed
                    questions.send_multipart([b"1.0", question[1], b"500", b"the daemon failed", b"", b""])

    def callback(self, _domain: str, key: bytes) -> bool:
        """The authenticator's question: may this public key connect?"""
        try:
            allowed = self._keys.allowed(key)
        except Exception as error:  # no descriptor left, a disk that does not answer: the next question is another one
            log.error("key %s was refused: the allowed keys cannot be read: %s", key.decode(errors="replace"), error)
            return False
        if not allowed:
            log.warning("a client with key %s was refused; `artctl key add` allows one", key.decode(errors="replace"))
        return allowed

    def admit(self, peer: bytes, key: str) -> bool:
        """Whether the key of a connection is still allowed; looked up once a second."""
        now = time.monotonic()
        name, until = self._names.get(key, ("", 0.0))
        if now >= until:
            try:
                name = self._keys.name(key.encode())
            except OSError as error:
                log.error("the allowed keys cannot be read, so what was allowed stays so: %s", error)
                name = "" if self._keys.is_removed(name) else name
            self._names[key] = (name, now + LOOK_S)
        if len(self._peers) >= PEERS and peer not in self._peers:
            del self._peers[next(iter(self._peers))]
        self._peers[peer] = name
        return bool(name)

    def who(self, peer: bytes) -> str:
        """The name of the key by which a peer has connected."""
        return self._peers.get(peer, "")

    # ---- the way in ---------------------------------------------------------------------------------------------------

    def listens(self, descriptor: int) -> None:
        self._listener = sockets.socket(fileno=os.dup(descriptor))

    def shut(self) -> None:
        assert self._listener is not None
        program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
        pointer = struct.pack("@HP", 1, ctypes.addressof(program))
        try:
            self._listener.setsockopt(sockets.SOL_SOCKET, ATTACH_FILTER, pointer)
        except OSError as error:
            log.error("%s stays open to further connections: %s", self.address, error)

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
    """Every socket for clients: the Unix socket `local`, and TCP at `bind` unless that is empty."""

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
        """Of the Unix socket."""
        return self._local.endpoint

    def bind(self, files: int) -> None:
        """files: how many this process may have open. Errors: CannotListen, keys.BadKey."""
        self._watch = Watch(files)
        for router in self._routers:
            router.bind(self._watch)
        self._watch.start()
        if self._remote is not None:
            log.info("clients of other machines: %s", self._remote.endpoint)

    def bind_again(self) -> None:
        """Of the Unix socket, see wire.Router; a port cannot be removed."""
        self._local.bind_again()

    async def run(self) -> None:
        """Receive until cancelled."""
        async with anyio.create_task_group() as group:
            for router in self._routers:
                group.start_soon(router.run)
            if self._curve is not None:
                group.start_soon(self._curve.run)

    def who(self, peer: bytes) -> str:
        """`key NAME` for a client of another machine, "" for one of this machine; peer: as `ask` got it."""
        if self._curve is None or not peer.startswith(MARK):
            return ""
        return f"key {self._curve.who(peer[len(MARK) :])}"

    def send(self, peer: bytes, message: object, bulk: Sequence[bytes] = ()) -> bool:
        """See wire.Router.send; peer: as `ask` got it."""
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
