"""The daemon: wires the services, starts them in order, stops them in reverse.

Owner of: the lock, daemon.json, gateway.json, the order of everything. The only file that knows every service.
Invariants: a service that crashes ends the daemon (recovery is cheap and tested: no half-alive daemon); an error of
COMMIT or fsync exits 70 and answers nobody.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import signal
import sqlite3
import sys
import time
from pathlib import Path

import anyio
import anyio.abc

from artd_schema import client_api as api
from artd_schema import paths
from artd_schema import worker as w
from artd_schema.codec import Codec, WireError
from artd_schema.crashpoint import reach

from . import __version__, lock
from .clock import Clock
from .config import Settings
from .disk import Disk
from .dispatch import Dispatch
from .ingest import Ingest
from .packing.service import Packer
from .push import Pusher
from .recover import identify, recover
from .requests import Requests
from .retain import Retain
from .route import Router as RouteTable
from .rundir import DataDir
from .runs import Runs
from .store import fs
from .store.blobs import Blobs
from .store.migrate import SchemaMismatch
from .store.store import Store, get_meta, set_meta
from .supervise import procfs
from .supervise.code import install_code
from .supervise.reap import Recorded, reap
from .wire import Router, WorkerWire
from .workforce import Boot, Workforce

log = logging.getLogger(__name__)
EX_IOERR = 70


def main(settings: Settings) -> int:
    """Run a daemon until a signal or `artd stop` ends it. Returns the exit status: 0, 1 (could not start), 130
    (forced)."""
    os.umask(0o077)
    _log_to_stderr(settings.log_level)
    root = Path(settings.data_dir)
    try:
        fs.make_dir(root)
        handle = lock.acquire(root, __version__, settings.drain_s)
        data = DataDir.make(root.resolve())
    except (lock.Owned, OSError) as error:
        print(f"artd: {error}", file=sys.stderr)
        return 1
    try:
        return anyio.run(Daemon(settings, data).run)
    except SchemaMismatch as error:
        print(f"artd: {root}: {error}", file=sys.stderr)
        return 1
    except sqlite3.DatabaseError as error:
        print(
            f"artd: {data.database}: {error}. Next: put a backup in its place, or another --data-dir", file=sys.stderr
        )
        return 1
    finally:
        os.close(handle)


class Daemon:
    """One boot."""

    def __init__(self, settings: Settings, data: DataDir) -> None:
        self._settings = settings
        self._data = data
        self._clock = Clock()
        self._stopping = anyio.Event()
        self._forced = False
        self._failed = False
        self._drain_s = settings.drain_s

    async def run(self) -> int:
        previous = paths.read_daemon_file(self._data.root)
        self._file = lock.describe(__version__, self._settings.drain_s)
        self._tell("starting")
        store = Store(self._data.database, self._clock, _fatal)
        await store.open()
        try:
            instance, boot = await store.write(lambda c: identify(c, self._data, self._clock.now_ms()))
            await self._reap(store, instance, boot, previous)
            await recover(store, self._data)
            await self._serve(store, instance, boot)
            reach("stop.drained")
            await store.write(lambda c: set_meta(c, "clean", "1"))
        finally:
            await store.close()
            self._leave()
        return 130 if self._forced else int(self._failed)

    async def _reap(self, store: Store, instance: str, boot: int, previous: paths.DaemonFile | None) -> None:
        owner = procfs.Identity(previous.boot_id, previous.pid, previous.ticks) if previous else None
        rows = await store.read("SELECT name, boot_id, pid, ticks, session FROM process WHERE pid IS NOT NULL")
        recorded = [Recorded(r["name"], r["boot_id"], r["pid"], r["ticks"], r["session"]) for r in rows]
        reaped = await reap(instance, boot, recorded, owner)
        for left in reaped.ended:
            log.warning("ended process %d of worker %s, left by an older boot", left.pid, left.name)
        for left in reaped.broken:
            log.error("%s: it does not die; see /proc/%d/stack", left, left.pid)

    async def _serve(self, store: Store, instance: str, boot: int) -> None:
        settings, data = self._settings, self._data
        max_message = settings.limits.max_message_mib << 20
        blobs = Blobs(data.blobs)
        wire = WorkerWire()
        code = await anyio.to_thread.run_sync(install_code, data.root)
        token = await store.write(_token)
        workers: Router[w.FromWorker] = Router(
            paths.socket_path(data.runtime, paths.WORKER_SOCKET), Codec(w.FromWorker), max_message, self._take
        )
        clients: Router[api.Request] = Router(
            paths.socket_path(data.runtime, paths.CLIENT_SOCKET), Codec(api.Request), max_message, self._ask,
            self._refuse,
        )  # fmt: skip
        wire.router = workers
        workers.bind()
        clients.bind()
        self._file = dataclasses.replace(self._file, socket=clients.endpoint)
        self._wire = wire
        self._store = store
        boot_info = Boot(instance=instance, number=boot, code=code, endpoint=workers.endpoint, token=token)
        self._workforce = workforce = Workforce(
            store=store, wire=wire, data=data, settings=settings, boot=boot_info, announce=self._announce_gateway,
            on_death=self._worker_died,
        )  # fmt: skip
        disk = Disk(data.root, settings.limits.min_free_mib << 20, self._clock)
        self._ingest = Ingest(store, blobs, settings.limits.max_body_kib << 10, disk.require)
        self._dispatch = Dispatch(store, wire, data, instance, workforce.kill)
        self._pusher = Pusher(store, wire, data, workforce.kill)
        self._routes = routes = RouteTable(store, wire)
        runs = Runs(store, workforce.require_runtimes, lambda: routes.routed)
        self._requests = Requests(
            store,
            self._ingest,
            runs,
            self._dispatch,
            clients.send,
            self.stop,
            instance,
            max_message,
            workforce.revive,
        )
        services = [
            workers.run, clients.run, workforce.run, routes.run, Packer(store, blobs, data).run,
            self._dispatch.run, self._pusher.run, self._ingest.run, Retain(store, data).run,
        ]  # fmt: skip
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                for service in services:
                    group.start_soon(service)
                group.start_soon(self._signals)
                group.start_soon(self._await_gateway)
                await self._stopping.wait()
                self._tell("draining")
                self._requests.draining = True
                await workforce.stop_all(0.0 if self._forced else self._drain_s)
                group.cancel_scope.cancel()
        finally:
            clients.close()
            workers.close()

    # ---- messages -----------------------------------------------------------------------------------------------------

    def _ask(self, peer: bytes, request: api.Request, bulk: list[bytes]) -> None:
        self._requests.take(peer, request, bulk)

    def _refuse(self, peer: bytes, frames: list[bytes], error: WireError) -> None:
        self._requests.refuse(peer, frames, error)

    def _take(self, peer: bytes, message: w.FromWorker, bulk: list[bytes]) -> None:
        """Messages of one worker are handled in the order in which they came."""
        if isinstance(message, w.Hello):
            self._group.start_soon(self._workforce.hello, peer, message)
            return
        who = self._wire.who(peer)
        if who is None:
            log.info(
                "%s from %s, which has not said Hello; ignored", type(message).__name__, peer.decode(errors="replace")
            )
            return
        name, spawn = who
        match message:
            case w.Beat():
                self._dispatch.beat(name, message)
            case w.Accepted():
                self._dispatch.accepted(message)
            case w.Held():
                self._pusher.held(message)
            case w.RouteTaken():
                self._routes.taken(message)
            case w.Progress():
                return
            case w.Exchange():
                self._group.start_soon(self._exchange, name, message, bulk)
            case w.Ready():
                self._group.start_soon(self._workforce.ready, name, spawn, message)
            case w.Down():
                self._workforce.down(name, spawn, message)
            case w.Staged():
                self._group.start_soon(self._dispatch.staged, message)
            case w.Failed():
                self._group.start_soon(self._dispatch.failed, message)
            case w.Refused():
                self._group.start_soon(self._pusher.refused, message)
            case w.Live():
                self._group.start_soon(self._pusher.live, message)
            case w.PushFailed():
                self._group.start_soon(self._pusher.failed, message)

    async def _exchange(self, name: str, message: w.Exchange, bulk: list[bytes]) -> None:
        try:
            answer = await self._ingest.exchange(message, bulk)
        except Exception as error:
            log.exception("exchange %s", message.response_id)
            answer = w.ExchangeAck(response_id=message.response_id, error=f"{type(error).__name__}: {error}")
        self._wire.send(name, answer)

    async def _worker_died(self, name: str, spawn: int, ordered: bool, error: str) -> None:
        """A process is proven dead: the services that had work with it take that work back."""
        if name == "trainer":
            await self._dispatch.died(spawn, ordered, error)
            await self._pusher.trainer_died()
        elif name == "engine":
            await self._pusher.engine_died(error, counted=not self._stopping.is_set())

    # ---- start and stop -----------------------------------------------------------------------------------------------

    def stop(self, drain_s: float) -> None:
        """Ask the daemon to end; workers get drain_s seconds."""
        self._drain_s = drain_s
        self._stopping.set()

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("got %s", signal.Signals(number).name)
                if self._stopping.is_set():
                    self._forced = True
                    await self._workforce.kill_all()
                self._stopping.set()

    async def _await_gateway(self) -> None:
        """Ready once the gateway listens; a gateway that cannot (its port is taken, say) ends the daemon."""
        while not self._workforce.gateway_ready.is_set():
            if self._workforce.supervisor.state("gateway") == "broken":
                self._failed = True
                log.critical("the gateway cannot start: %s", self._workforce.supervisor.info("gateway").error)
                self._stopping.set()
                return
            with anyio.move_on_after(0.2):
                await self._workforce.gateway_ready.wait()
        self._tell("ready")
        log.info("ready: %s, gateway at %s", self._data.root, self._file.url)

    def _announce_gateway(self, url: str) -> None:
        self._file = dataclasses.replace(self._file, url=url)
        if self._workforce.gateway_ready.is_set() and not self._stopping.is_set():
            self._tell("ready")

    def _tell(self, state: str) -> None:
        self._file = dataclasses.replace(self._file, state=state)
        paths.write_daemon_file(self._data.root, self._file)

    def _leave(self) -> None:
        (self._data.root / paths.DAEMON_JSON).unlink(missing_ok=True)


def _token(c: sqlite3.Connection) -> str:
    """The gateway's bearer token, made once per data folder."""
    token = get_meta(c, "gateway_token")
    if not token:
        token = secrets.token_urlsafe(32)
        set_meta(c, "gateway_token", token)
    return token


def _fatal(error: BaseException) -> None:
    """COMMIT or fsync failed: what is durable is unknown. Nobody is answered; the next boot reads the database and
    decides."""
    log.critical(
        "the store failed (%s); what is durable is unknown, so artd ends here. Next: artd start", error, exc_info=error
    )
    logging.shutdown()
    os._exit(EX_IOERR)


def _log_to_stderr(level: str) -> None:
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )  # fmt: skip
    for chatty in ("httpx", "aiosqlite", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
