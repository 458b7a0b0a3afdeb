"""Runs the gateway's process: the daemon's link on one side, uvicorn on the other.

Every message of the daemon is handled in the event loop, in the order of arrival. The listening socket is the daemon's. The process
ends when the daemon says Exit or refuses it, or when its link breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import queue
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

import uvicorn

from artd_schema.crashpoint import reach
from artd_schema.wire import worker as w
from artd_schema.wire.deliveries import Recalled
from artd_workers.daemon_link import Link, LinkClosed, Rejected
from artd_workers.gateway.engine.client import Engines
from artd_workers.gateway.http.app import make_app
from artd_workers.gateway.http.patience import Crowd, PatientProtocol, most_connections
from artd_workers.gateway.request.asked import Asking
from artd_workers.gateway.request.flow import Flow

from .ledger import Ledger, Send
from .limits import Limits
from .routing import Table

log = logging.getLogger("artd.gateway")
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that they close it and never meet a closing one."""
_LINK_POLL_S = 0.25


class Gateway:
    """The gateway's parts, and what each message of the daemon does to them."""

    def __init__(self, send: Send, limits: Limits, token: str, stop: Callable[[float], None], spawn: int = 0) -> None:
        self.asking = Asking(send, limits, spawn)
        self.table = Table(limits)
        self.engines = Engines(limits)
        self.ledger = Ledger(send, limits)
        flow = Flow(self.table, self.engines, self.ledger, limits, self.asking)
        self.app = make_app(self.table, flow, self.asking, limits, token)
        self._send = send
        self._stop = stop

    async def handle(self, message: w.ToWorker, bulk: Sequence[bytes] = ()) -> None:
        match message:
            case w.Route():
                seq = self.table.take(message)
                self.engines.keep(self.table.sockets)
                self._send(w.RouteTaken(seq=seq), ())
            case w.Hold(push=push, fence=fence, engine=engine):
                in_flight = self.table.hold(engine)
                reach("gateway.held")
                self._send(w.Held(push=push, fence=fence, engine=engine, in_flight=in_flight), ())
            case w.ExchangeAck(response_id=response_id):
                if not self.ledger.settle(message):
                    log.warning("acknowledgement of %s came after its request had ended", response_id)
            case Recalled():
                self.asking.settle(message, bulk)
            case w.Exit(grace_s=grace_s):
                self.table.drain()
                self._stop(grace_s)
            case _:
                log.error("message %s is not for a gateway; ignored", type(message).__name__)


class Mailbox:
    """Carries messages from the link's thread into the event loop, in order; keeps those that come before it runs."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[tuple[w.ToWorker, list[bytes]]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Event | None = None

    def put(self, message: w.ToWorker, bulk: list[bytes]) -> None:
        self._messages.put((message, bulk))
        if self._loop is not None and self._ready is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to tell
                self._loop.call_soon_threadsafe(self._ready.set)

    async def deliver(self, handle: Callable[[w.ToWorker, Sequence[bytes]], Awaitable[None]]) -> None:
        """Hand every message to `handle`, for ever."""
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while True:
            self._ready.clear()
            while not self._messages.empty():
                await handle(*self._messages.get())
            await self._ready.wait()


class _Server(uvicorn.Server):
    """uvicorn that tells when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    def end(self, grace_s: float) -> None:
        self.config.timeout_graceful_shutdown = int(grace_s)
        self.should_exit = True


def inherit_listener() -> socket.socket:
    """Return the listening TCP socket, which the daemon holds, too. Raises ValueError, OSError."""
    if not (number := os.environ.get(w.LISTENER, "")).isdecimal():
        raise ValueError(f"{w.LISTENER} names no socket; the gateway is started by `artd start`, not by hand")
    listener = socket.socket(fileno=int(number))
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base address for clients of this machine; a wildcard address becomes loopback."""
    host, port = listener.getsockname()[:2]
    ip = ipaddress.ip_address(host)
    if ip.is_unspecified:
        host = "127.0.0.1" if ip.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(link: Link, mailbox: Mailbox, welcome: w.Welcome, listener: socket.socket) -> int:
    """Serve until the daemon or a signal ends it. Returns the exit status."""
    assert welcome.gateway is not None
    limits = Limits(max_message=welcome.max_message)
    gateway = Gateway(
        link.send, limits, welcome.gateway.token, lambda grace_s: server.end(grace_s), link.identity.spawn
    )
    most = most_connections()
    config = uvicorn.Config(
        gateway.app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S, ws="none",
        http=functools.partial(PatientProtocol, crowd=Crowd(limits, most)),  # type: ignore[arg-type]  # a class, to uvicorn
        backlog=min(2048, most // 4), limit_concurrency=most,
    )  # fmt: skip
    server = _Server(config, lambda: link.send(w.Ready(url=url_of(listener))))
    serving = asyncio.create_task(server.serve([listener]))
    delivering = asyncio.create_task(mailbox.deliver(gateway.handle))
    watching = asyncio.create_task(_watch(link))
    await asyncio.wait({serving, delivering, watching}, return_when=asyncio.FIRST_COMPLETED)
    lost = watching.done() and not serving.done()
    if not serving.done():
        server.end(0)
    await asyncio.wait({serving})
    delivering.cancel()
    watching.cancel()
    ended = await asyncio.gather(serving, delivering, watching, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    if lost:
        log.error("the link to the daemon is broken; ending")
    return 1 if lost else 0


async def _watch(link: Link) -> None:
    while not link.closed.is_set():
        await asyncio.sleep(_LINK_POLL_S)


def main() -> int:
    """Run the gateway as a child of the daemon. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    link = Link.from_env("gateway", {"uvicorn": uvicorn.__version__})
    mailbox = Mailbox()
    link.on_message = mailbox.put
    try:
        welcome = link.start()
    except (Rejected, LinkClosed) as error:
        log.error("%s", error)
        return 1
    try:
        if welcome.gateway is None:
            raise ValueError("the daemon's Welcome has no gateway configuration")
        listener = inherit_listener()
    except (OSError, ValueError) as error:
        log.error("%s", error)
        link.send(w.Down(error=str(error)))
        link.close()
        return 1
    try:
        with listener:
            return asyncio.run(serve(link, mailbox, welcome, listener))
    finally:
        link.close()
