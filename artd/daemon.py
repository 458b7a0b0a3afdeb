"""Runs the daemon: boots, serves and stops.

It owns the lock, daemon.json, the sockets, and the order of boot and stop; `services` knows the services. A service that
crashes ends the daemon: recovery is cheap and tested, so a half-alive daemon is never needed. After an error of COMMIT or fsync
the daemon exits with 70 and answers nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import secrets
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.abc

from artd.datadir import folder, lock
from artd.datadir.disk import give_up
from artd.datadir.layout import DataDir
from artd.health import notify
from artd.health.heart import Heart
from artd.net import descriptors
from artd.net.keys import BadKey, Keys
from artd.net.remote import CannotListen, ClientWire
from artd.net.router import Router, WorkerWire
from artd.net.sockets import Sockets
from artd.net.under_way import UnderWay
from artd.retention.code_copies import delete_copies
from artd.serving import gateway_address
from artd.store import fs
from artd.store.migrate import SchemaMismatch
from artd.store.origin import ForeignLog
from artd.store.room import is_full
from artd.store.store import DatabaseInUse, Store, get_meta, set_meta
from artd.store.writer import StoreFull
from artd.supervise import procfs
from artd.supervise.code import install_code
from artd.supervise.packages import install_packages
from artd.supervise.reap import Leftover, Recorded, reap
from artd.supervise.scratch import sweep_folders
from artd_schema import paths
from artd_schema.codec import Codec
from artd_schema.crashpoint import reach
from artd_schema.run.scratch import sweep
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import GATEWAY

from . import __version__
from .clock import Clock
from .config import Settings
from .recover import identify, recover
from .services import Services
from .workforce import Boot

log = logging.getLogger(__name__)
EX_IOERR = 70
OWNED = 6
"""The value of cli.outcome.CONFLICT."""
BROKEN = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN)


def main(settings: Settings) -> int:
    """Run a daemon until a signal or `artd stop` ends it. Returns the exit status: 0, 1 (could not start), 6 (another
    daemon runs), 70 (the disk fails), 130 (forced)."""
    os.umask(0o077)
    _log_to_stderr(settings.log_level)
    root = Path(settings.data_dir)
    try:
        files = descriptors.raise_limit()
        folder.take(root)
        held = lock.acquire(root, __version__, settings.drain_s)
        data = DataDir.make(root.resolve())
    except folder.Refused as error:
        print(f"artd: {error.line()}", file=sys.stderr)
        return 1
    except lock.Owned as error:
        print(f"artd: {error}", file=sys.stderr)
        return OWNED
    except (descriptors.TooFew, OSError) as error:
        print(f"artd: {error}", file=sys.stderr)
        return 1
    fs.on_sync_error = _fatal
    try:
        return anyio.run(Daemon(settings, data, files).run)
    except (SchemaMismatch, ForeignLog, DatabaseInUse, CannotListen, BadKey) as error:
        print(f"artd: {root}: {error}", file=sys.stderr)
        return 1
    except (OSError, sqlite3.DatabaseError, BaseExceptionGroup) as error:
        return _explain_end(data, error)
    finally:
        held.close()


class Daemon:
    """One boot of the daemon. `files` is the limit of open files of this process."""

    def __init__(self, settings: Settings, data: DataDir, files: int) -> None:
        self._settings = settings
        self._files = files
        self._data = data
        self._clock = Clock()
        self._stopping = anyio.Event()
        self._forced = False
        self._failed = False
        self._drain_s = settings.drain_s
        self._sockets = Sockets(data)
        self._heart = Heart(data, self._mend, notify.alive)

    async def run(self) -> int:
        previous = paths.read_daemon_file(self._data.root)
        self._file = lock.describe(__version__, self._settings.drain_s)
        self._beating = beating = asyncio.create_task(self._heart.run())
        try:
            if fs.refusal(self._data.root):
                give_up(self._data.root)
            self._tell("starting")
            return await self._boot(previous)
        finally:
            beating.cancel()
            self._leave()

    async def _boot(self, previous: paths.DaemonFile | None) -> int:
        store = Store(self._data.database, self._clock, _fatal)
        await store.open()
        store.on_full(lambda: give_up(self._data.root))
        try:
            self._heart.watch(lambda: store.submit(lambda c: None), lambda: store.commits[0])
            instance, boot = await store.write(lambda c: identify(c, self._data, self._clock.now_ms()))
            leftovers = await self._reap(store, instance, boot, previous)  # first: an older gateway may hold the port
            with await self._listen(store) as listener:
                await recover(store, self._data)
                await self._serve(store, instance, boot, leftovers, listener)
            reach("stop.drained")
            await store.write(lambda c: set_meta(c, "clean", "1"))
        finally:
            await store.close()
        return 130 if self._forced else int(self._failed)

    async def _reap(
        self, store: Store, instance: str, boot: int, previous: paths.DaemonFile | None
    ) -> tuple[Leftover, ...]:
        """End the processes that older boots left. Returns those that do not die; no worker of their name may start."""
        owner = procfs.Identity(previous.boot_id, previous.pid, previous.ticks) if previous else None
        rows = await store.read("SELECT name, boot_id, pid, ticks, session FROM process WHERE pid IS NOT NULL")
        recorded = [Recorded(r["name"], r["boot_id"], r["pid"], r["ticks"], r["session"]) for r in rows]
        reaped = await reap(instance, boot, recorded, owner)
        for left in reaped.ended:
            log.warning("ended process %d of worker %s, which an older boot left", left.pid, left.name)
        for left in reaped.broken:
            log.error("%s: an older boot left it, and it does not die; see /proc/%d/task/*/stack", left, left.pid)
        await anyio.to_thread.run_sync(self._sweep, {left.name for left in reaped.broken})
        return reaped.broken

    def _sweep(self, live: set[str]) -> None:
        """Remove files that dead processes of older boots left outside the data folder. `live` names the workers with a process
        that does not die."""
        if gone := sweep_folders(self._data.runtime):
            log.info("removed %d scratch folders of dead processes from %s", len(gone), self._data.runtime)
        for engine, record in self._data.scratch_records().items():
            if engine not in live:
                sweep(record)

    async def _listen(self, store: Store) -> socket.socket:
        """Open the gateway's listening socket, at the earlier port if the settings name none. Raises CannotListen."""
        before = await store.write(lambda c: int(get_meta(c, "gateway_port", "0")))
        return await anyio.to_thread.run_sync(gateway_address.listen, self._settings.gateway, before)

    async def _serve(
        self, store: Store, instance: str, boot: int, leftovers: tuple[Leftover, ...], listener: socket.socket
    ) -> None:
        settings, data = self._settings, self._data
        max_message = settings.limits.max_message_mib << 20
        under_way = UnderWay(settings.limits.under_way_mib << 20)
        code = await anyio.to_thread.run_sync(install_code, data.root)
        packages = await anyio.to_thread.run_sync(install_packages, data.root)
        if not leftovers:  # else a process may still run an older copy
            await anyio.to_thread.run_sync(delete_copies, data, {code.name, *packages.digests})
        token = await store.write(_token)
        workers: Router[w.FromWorker] = Router(
            self._sockets.workers, Codec(w.FromWorker), max_message,
            lambda *message: services.take(*message),
        )  # fmt: skip
        clients = ClientWire(
            self._sockets.clients, settings.remote.bind, Keys(data.root), max_message,
            lambda *request: services.ask(*request), lambda *request: services.refuse(*request), under_way,
        )  # fmt: skip
        boot_info = Boot(
            instance=instance, number=boot, code=code, endpoint=workers.endpoint, token=token, leftovers=leftovers,
            listener=listener, packages=packages,
        )  # fmt: skip
        services = Services(
            store,
            WorkerWire(workers),
            data,
            settings,
            boot_info,
            clients.send,
            self.stop,
            self._announce_gateway,
            under_way, clients.who,
        )  # fmt: skip
        self._workforce = services.workforce
        workers.bind()
        clients.bind(self._files)
        self._sockets.watch(workers, clients)
        self._file = dataclasses.replace(self._file, socket=clients.endpoint)
        try:
            async with anyio.create_task_group() as group:
                services.start(group)
                for task in (workers.run, clients.run, self._signals, self._await_gateway, self._beat):
                    group.start_soon(task)
                await self._stopping.wait()
                self._tell("draining")
                notify.say("STOPPING=1")
                await services.drain(0.0 if self._forced else self._drain_s)
                group.cancel_scope.cancel()
        finally:
            self._sockets.forget()
            clients.close()
            workers.close()

    async def _beat(self) -> None:
        await self._beating  # the heart started before the task group; if it fails, the daemon ends as for any service

    def _mend(self) -> None:
        fs.catch_up()
        if self._sockets.mend():
            self._workforce.mend(self._sockets.workers.address)
            self._file = dataclasses.replace(self._file, socket=self._sockets.clients.address)
            self._tell(self._file.state)

    # ---- start and stop -----------------------------------------------------------------------------------------------

    def stop(self, drain_s: float) -> None:
        """Ask the daemon to end. Workers get `drain_s` seconds."""
        self._drain_s = drain_s
        self._stopping.set()

    async def _signals(self) -> None:
        ending = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            ending.append(signal.SIGHUP)
        with anyio.open_signal_receiver(*ending) as signals:
            async for number in signals:
                log.info("got %s", signal.Signals(number).name)
                if self._stopping.is_set() and number != signal.SIGHUP:  # a terminal that closes may send it twice
                    self._forced = True
                    await self._workforce.kill_all()
                self._stopping.set()

    async def _await_gateway(self) -> None:
        """Report ready when the gateway listens. A gateway that cannot start (for example, its port is taken) ends the daemon."""
        while not self._workforce.gateway_ready.is_set():
            if self._workforce.supervisor.state(GATEWAY) == "broken":
                self._failed = True
                log.critical("the gateway cannot start: %s", self._workforce.supervisor.info(GATEWAY).error)
                self._stopping.set()
                return
            with anyio.move_on_after(0.2):
                await self._workforce.gateway_ready.wait()
        self._tell("ready")
        notify.say("READY=1")
        log.info("ready: %s, gateway at %s", self._data.root, self._file.url)

    def _announce_gateway(self, url: str) -> None:
        self._file = dataclasses.replace(self._file, url=url)
        if self._workforce.gateway_ready.is_set() and not self._stopping.is_set():
            self._tell("ready")

    def _tell(self, state: str) -> None:
        self._file = dataclasses.replace(self._file, state=state)
        fs.write_or_later(paths.DAEMON_JSON, lambda: paths.write_daemon_file(self._data.root, self._file))

    def _leave(self) -> None:
        (self._data.root / paths.DAEMON_JSON).unlink(missing_ok=True)
        self._heart.close()


def _token(c: sqlite3.Connection) -> str:
    """Return the gateway's bearer token; make it once per data folder."""
    token = get_meta(c, "gateway_token")
    if not token:
        token = secrets.token_urlsafe(32)
        set_meta(c, "gateway_token", token)
    return token


def _explain_end(data: DataDir, error: BaseException) -> int:
    """Print a line about a disk or database that ended the daemon. Returns the exit status. Raises any other error again."""
    causes = list(_causes(error))
    if all(_is_full(cause, data.root) for cause in causes):
        print(f"artd: {data.root}: {causes[0]}. Next: free space, or another --data-dir", file=sys.stderr)
        return 1
    if all(getattr(cause, "errno", 0) in BROKEN or _sqlite_code(cause) == sqlite3.SQLITE_IOERR for cause in causes):
        log.critical("%s: %s: the disk fails, so artd ends here. Next: dmesg, then artd start", data.root, causes[0])
        return EX_IOERR
    if isinstance(error, sqlite3.DatabaseError):
        print(
            f"artd: {data.database} is damaged: {error}. Next: artd restore BACKUP --data-dir NEW; docs/operations.md, "
            "`A check that is not clean`", file=sys.stderr,
        )  # fmt: skip
        return 1
    raise error


def _causes(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _causes(part)
    else:
        yield error


def _is_full(error: BaseException, folder: Path | None = None) -> bool:
    return isinstance(error, StoreFull) or fs.is_full(error) or is_full(error, folder)


def _sqlite_code(error: BaseException) -> int:
    """Return the primary result code of an SQLite error, 0 for another error."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _fatal(error: BaseException) -> None:
    """End the process after a failed COMMIT or fsync, because nobody knows what is durable.

    The daemon answers nobody; the next boot reads the database and decides. The message tells a full disk from a failing one,
    because their remedies differ.
    """
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
