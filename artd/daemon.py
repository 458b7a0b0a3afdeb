"""The daemon: boots, serves, stops.

Owner of: the lock, daemon.json, the sockets, the order of everything; which services there are, `services` knows.
Invariants: a service that crashes ends the daemon (recovery is cheap and tested: no half-alive daemon); an error of
COMMIT or fsync exits 70 and answers nobody.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import secrets
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.abc

from artd_schema import paths
from artd_schema import worker as w
from artd_schema.codec import Codec
from artd_schema.crashpoint import reach

from . import __version__, gateway_address, lock
from .clock import Clock
from .config import Settings
from .disk import give_up
from .keys import BadKey, Keys
from .recover import identify, recover
from .remote import CannotListen, ClientWire
from .rundir import DataDir
from .services import Services
from .store import fs
from .store.migrate import SchemaMismatch
from .store.store import Store, get_meta, set_meta
from .store.writer import StoreFull
from .supervise import procfs
from .supervise.code import install_code
from .supervise.reap import Leftover, Recorded, reap
from .wire import Local, Router, WorkerWire
from .workforce import Boot

log = logging.getLogger(__name__)
EX_IOERR = 70
BROKEN = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN)


def main(settings: Settings) -> int:
    """Run a daemon until a signal or `artd stop` ends it. Returns the exit status: 0, 1 (could not start), 70 (the
    disk fails), 130 (forced)."""
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
    fs.on_sync_error = _fatal
    try:
        return anyio.run(Daemon(settings, data).run)
    except (SchemaMismatch, CannotListen, BadKey) as error:
        print(f"artd: {root}: {error}", file=sys.stderr)
        return 1
    except (OSError, sqlite3.DatabaseError, BaseExceptionGroup) as error:
        return _ended(data, error)
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
        store.on_full(lambda: give_up(self._data.root))
        try:
            instance, boot = await store.write(lambda c: identify(c, self._data, self._clock.now_ms()))
            leftovers = await self._reap(store, instance, boot, previous)  # an older gateway among them
            await anyio.to_thread.run_sync(gateway_address.require, self._settings.gateway)
            await recover(store, self._data)
            await self._serve(store, instance, boot, leftovers)
            reach("stop.drained")
            await store.write(lambda c: set_meta(c, "clean", "1"))
        finally:
            await store.close()
            self._leave()
        return 130 if self._forced else int(self._failed)

    async def _reap(
        self, store: Store, instance: str, boot: int, previous: paths.DaemonFile | None
    ) -> tuple[Leftover, ...]:
        """End what older boots left behind; returns what does not die, beside which no worker of its name may start."""
        owner = procfs.Identity(previous.boot_id, previous.pid, previous.ticks) if previous else None
        rows = await store.read("SELECT name, boot_id, pid, ticks, session FROM process WHERE pid IS NOT NULL")
        recorded = [Recorded(r["name"], r["boot_id"], r["pid"], r["ticks"], r["session"]) for r in rows]
        reaped = await reap(instance, boot, recorded, owner)
        for left in reaped.ended:
            log.warning("ended process %d of worker %s, left by an older boot", left.pid, left.name)
        for left in reaped.broken:
            log.error("%s: left by an older boot, it does not die; see /proc/%d/task/*/stack", left, left.pid)
        return reaped.broken

    async def _serve(self, store: Store, instance: str, boot: int, leftovers: tuple[Leftover, ...]) -> None:
        settings, data = self._settings, self._data
        max_message = settings.limits.max_message_mib << 20
        code = await anyio.to_thread.run_sync(install_code, data.root)
        token = await store.write(_token)
        workers: Router[w.FromWorker] = Router(
            Local(paths.socket_path(data.runtime, paths.WORKER_SOCKET)), Codec(w.FromWorker), max_message,
            lambda *message: services.take(*message),
        )  # fmt: skip
        clients = ClientWire(
            paths.socket_path(data.runtime, paths.CLIENT_SOCKET), settings.remote.bind, Keys(data.root), max_message,
            lambda *request: services.ask(*request), lambda *request: services.refuse(*request),
        )  # fmt: skip
        boot_info = Boot(
            instance=instance, number=boot, code=code, endpoint=workers.endpoint, token=token, leftovers=leftovers
        )
        services = Services(
            store, WorkerWire(workers), data, settings, boot_info, clients.send, self.stop, self._announce_gateway
        )
        self._workforce = services.workforce
        workers.bind()
        clients.bind()
        self._file = dataclasses.replace(self._file, socket=clients.endpoint)
        try:
            async with anyio.create_task_group() as group:
                services.start(group)
                for task in (workers.run, clients.run, self._signals, self._await_gateway):
                    group.start_soon(task)
                await self._stopping.wait()
                self._tell("draining")
                await services.drain(0.0 if self._forced else self._drain_s)
                group.cancel_scope.cancel()
        finally:
            clients.close()
            workers.close()

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
        try:
            paths.write_daemon_file(self._data.root, self._file)
        except OSError as error:
            if not fs.is_full(error):
                raise
            log.warning("%s cannot be written: %s", paths.DAEMON_JSON, error)

    def _leave(self) -> None:
        (self._data.root / paths.DAEMON_JSON).unlink(missing_ok=True)


def _token(c: sqlite3.Connection) -> str:
    """The gateway's bearer token, made once per data folder."""
    token = get_meta(c, "gateway_token")
    if not token:
        token = secrets.token_urlsafe(32)
        set_meta(c, "gateway_token", token)
    return token


def _ended(data: DataDir, error: BaseException) -> int:
    """The exit status where the disk or the database ended the daemon, and a line about it; anything else is raised again."""
    causes = list(_causes(error))
    if all(map(_is_full, causes)):
        print(f"artd: {data.root}: {causes[0]}. Next: free space, or another --data-dir", file=sys.stderr)
        return 1
    if all(getattr(cause, "errno", 0) in BROKEN or _sqlite_code(cause) == sqlite3.SQLITE_IOERR for cause in causes):
        log.critical("%s: %s: the disk fails, so artd ends here. Next: dmesg, then artd start", data.root, causes[0])
        return EX_IOERR
    if isinstance(error, sqlite3.DatabaseError):
        print(
            f"artd: {data.database}: {error}. Next: put a backup in its place, or another --data-dir", file=sys.stderr
        )
        return 1
    raise error


def _causes(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _causes(part)
    else:
        yield error


def _is_full(error: BaseException) -> bool:
    return isinstance(error, StoreFull) or fs.is_full(error) or _sqlite_code(error) == sqlite3.SQLITE_FULL


def _sqlite_code(error: BaseException) -> int:
    """Primary result code of an error of SQLite; 0 for none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _fatal(error: BaseException) -> None:
    """COMMIT or fsync failed: what is durable is unknown. Nobody is answered; the next boot reads the database and
    decides. A full disk is told from a failing one: it is no fault of the disk, and is mended otherwise."""
    full = _is_full(error)
    log.critical(
        "the store failed (%s); what is durable is unknown, so artd ends here. Next: %sartd start",
        error, "free space, then " if full else "", exc_info=None if full else error,
    )  # fmt: skip
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
