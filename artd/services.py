"""Creates and connects the services of one boot: who gets which message, and who learns of a worker's death.

The daemon adds sockets, files and signals; tests/model adds a simulated wire and clock, so both use these connections.
Messages of one worker are handled in the order in which they arrive. The services learn of a death only after it is
proven. A service that raises ends the task group, and with it the daemon, unless it only lacks file descriptors.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from artd.api.requests import Requests, Send
from artd.datadir.disk import Disk
from artd.datadir.layout import DataDir
from artd.datadir.log_files import LogFiles
from artd.net.descriptors import is_scarce
from artd.net.router import WorkerWire
from artd.net.under_way import UnderWay
from artd.packing.process import STALL_S
from artd.packing.service import Packer
from artd.retention.checkpoints import CheckpointRetention
from artd.retention.clock_jumps import ClockWatch
from artd.retention.collector import Collector
from artd.retention.deletion import Deleter
from artd.rollouts.deliveries import Deliveries
from artd.rollouts.ingest import Ingest
from artd.runs.lifecycle import Runs
from artd.serving.pusher import Pusher
from artd.serving.routing_table import Router as RouteTable
from artd.store.blobs import Blobs
from artd.store.store import Store
from artd.supervise.lease import Leases
from artd.training.dispatch import Dispatch
from artd_schema.codec import WireError
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.deliveries import Delivery, Recall, Recalled
from artd_schema.wire.worker_names import parse_worker

from .config import Settings
from .errors import Busy, Conflict, NotFound
from .workforce import Boot, Workforce

log = logging.getLogger(__name__)
SCARCE_S = 1.0


class Services:
    """All services of one boot. `take`, `ask` and `refuse` are the handlers of the routers.

    `reply` sends an answer to a client. `stop(drain_s)` asks the daemon to end. `announce(url)` tells that the gateway
    can be reached there. The clients' routers look at `under_way` before they read on. `who`: see Requests.
    """

    def __init__(
        self, store: Store, wire: WorkerWire, data: DataDir, settings: Settings, boot: Boot, reply: Send,
        stop: Callable[[float], None], announce: Callable[[str], None], under_way: UnderWay | None = None,
        who: Callable[[bytes], str] = lambda peer: "",
    ) -> None:  # fmt: skip
        limits = settings.limits
        self._under_way = under_way or UnderWay(limits.under_way_mib << 20)
        blobs = Blobs(data.blobs, store.clock.monotonic)
        self._disk = disk = Disk(data.root, limits.min_free_mib << 20, store.clock, limits.reserve_mib << 20)
        self._times = times = ClockWatch(store)
        self._collector = Collector(store, blobs, settings.retention, times.jumped)
        self._logs = LogFiles(data.logs, limits.log_mib << 20)
        self.workforce = workforce = Workforce(
            store=store, wire=wire, data=data, settings=settings, boot=boot, announce=announce,
            on_death=self._worker_died,
        )  # fmt: skip
        self._wire = wire
        self._store = store
        self._stopping = False
        self._ingest = Ingest(store, blobs, limits.max_body_kib << 10, disk.require, times.jumped)
        self._deliveries = Deliveries(store, self._ingest, blobs)
        self._dispatch = Dispatch(store, wire, data, boot.instance, disk.lacks)
        self._leases = Leases(store.clock, limits.lease_s, workforce.holders, self._kill_silent)
        self._stalls = Leases(store.clock, limits.stall_s, self._dispatch.holders, self._kill_stalled)
        self._pusher = Pusher(store, wire, data, workforce.kill)
        self._routes = routes = RouteTable(store, wire)
        self._packer = Packer(store, blobs, data, disk.lacks, min(STALL_S, limits.stall_s or STALL_S))
        self._retain = CheckpointRetention(store, data)
        self._deleter = Deleter(store, data)
        runs = Runs(store, workforce.require_runtimes, lambda: routes.routed, packages=boot.packages)
        self._requests = Requests(
            store,
            self._ingest,
            runs,
            self._dispatch,
            reply,
            stop,
            boot.instance,
            limits.max_message_mib << 20,
            workforce.revive,
            self._collector,
            under_way=self._under_way,
            who=who,
        )

    def start(self, group: TaskGroup) -> None:
        """Run every service in this group, until it is cancelled."""
        self._group = group
        for service in (
            self.workforce, self._routes, self._packer, self._dispatch, self._pusher, self._ingest, self._retain,
            self._deleter,
        ):  # fmt: skip
            group.start_soon(patient, service.run)
        for watch in (self._leases.run, self._stalls.run, self._times.run, self._collector.run, self._logs.run):
            group.start_soon(patient, watch)
        group.start_soon(patient, self._disk.run, self._store)
        group.start_soon(self._requests.run)

    async def drain(self, grace_s: float) -> None:
        """Accept no more work and end the workers within `grace_s` seconds."""
        self._stopping = self._requests.draining = True
        self._store.hurry()
        await self.workforce.stop_all(grace_s)

    # ---- messages -----------------------------------------------------------------------------------------------------

    def ask(self, peer: bytes, request: api.Request, bulk: list[bytes], header: int) -> None:
        """Take a client's request. `header` is the number of bytes of its frame."""
        self._requests.take(peer, request, bulk, header)

    def refuse(self, peer: bytes, frames: list[bytes], error: WireError) -> None:
        """Answer a client whose request cannot be read."""
        self._requests.refuse(peer, frames, error)

    def take(self, peer: bytes, message: w.FromWorker, bulk: list[bytes]) -> None:
        """Pass a worker's message to its service."""
        if isinstance(message, w.Hello):
            self._group.start_soon(patient, self.workforce.hello, peer, message)
            return
        who = self._wire.who(peer)
        if who is None:
            level = logging.DEBUG if isinstance(message, w.Beat) else logging.INFO
            log.log(
                level,
                "%s from %s, which is not a present worker",
                type(message).__name__,
                peer.decode(errors="replace"),
            )
            if isinstance(message, w.Staged | w.Failed | w.Beat) and message.job:
                self._group.start_soon(self._answer_late, peer, message)
            return
        name, spawn = who
        self._leases.renew(name, spawn)
        match message:
            case w.Beat():
                if message.push:
                    self._pusher.beat(message)
                elif self._dispatch.beat(name, message):
                    self._stalls.renew(name, spawn)
            case w.Accepted():
                self._dispatch.take_accepted(name, message)
            case w.Held():
                self._pusher.take_held(message)
            case w.RouteTaken():
                self._routes.confirm(message)
            case w.Exchange():
                self._group.start_soon(self._exchange, name, message, bulk)
            case Delivery():
                self._group.start_soon(self._note_delivery, message)
            case Recall():
                self._group.start_soon(self._recall, name, message)
            case w.Ready():
                self._pusher.transfers.able(name, spawn, message.transfers)
                self._group.start_soon(patient, self.workforce.ready, name, spawn, message)
            case w.Down():
                self.workforce.down(name, spawn, message)
            case w.Staged():
                self._group.start_soon(patient, self._dispatch.take_staged, name, message)
            case w.Failed():
                self._group.start_soon(patient, self._dispatch.take_failed, name, message)
            case w.Refused():
                self._group.start_soon(patient, self._pusher.take_refused, message)
            case w.Pausing():
                self._group.start_soon(patient, self._pusher.pausing, message)
            case w.Live():
                self._group.start_soon(patient, self._pusher.live, message)
            case w.PushFailed():
                self._group.start_soon(patient, self._pusher.take_failed, message)

    async def _answer_late(self, peer: bytes, message: w.Staged | w.Failed | w.Beat) -> None:
        if (answer := await self._dispatch.late(message)) is not None:
            self._wire.answer(peer, answer)

    async def _exchange(self, name: str, message: w.Exchange, bulk: list[bytes]) -> None:
        size = sum(map(len, bulk))
        self._under_way.take(size)
        try:
            answer = await self._deliveries.exchange(message, bulk)
        except Exception as error:
            if not isinstance(error, Busy | Conflict):
                log.exception("exchange %s", message.response_id)
            closed = isinstance(error, Conflict)
            said = str(error) if closed else f"{type(error).__name__}: {error}"
            answer = w.ExchangeAck(response_id=message.response_id, error=said, closed=closed)
        finally:
            self._under_way.give(size)
        self._wire.send(name, answer)

    async def _note_delivery(self, message: Delivery) -> None:
        try:
            await self._deliveries.note(message)
        except Exception as error:  # without its mark, the reply counts as delivered until the same request comes again
            log.warning("how the reply %s ended is not noted: %s: %s", message.response_id, type(error).__name__, error)

    async def _recall(self, name: str, message: Recall) -> None:
        try:
            answer, turns = await self._deliveries.recall(message)
        except NotFound:
            answer, turns = Recalled(number=message.number), []
        except Exception as error:
            log.warning("recall of rollout %s: %s: %s", message.rollout, type(error).__name__, error)
            answer, turns = Recalled(number=message.number, error=str(error)), []
        self._wire.send(name, answer, turns)

    def _kill_silent(self, name: str, seconds: float, spawn: int) -> None:
        """Kill a worker that sent nothing for too long."""
        self.workforce.kill(name, f"it was silent for {seconds:.1f} s (limits.lease_s)", spawn)

    def _kill_stalled(self, name: str, seconds: float, spawn: int) -> None:
        """Kill a trainer whose job makes no progress."""
        self.workforce.kill(name, self._dispatch.mark_stalled(name, seconds), spawn, traced=True)

    async def _worker_died(self, name: str, spawn: int, ordered: bool, error: str, tail: str) -> None:
        """Have the services take their work back from a process that is proven dead."""
        match parse_worker(name).kind:
            case "trainer":
                await self._dispatch.take_back(name, spawn, ordered, error, tail)
                await self._pusher.trainer_died(name)
            case "engine":
                await self._pusher.engine_died(name, error, counted=not self._stopping)
            case "gateway":
                self._pusher.gateway_died()


async def patient(work: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Call `work`, and call it again if it fails for lack of file descriptors, which passes. Starting again is safe,
    because every service decides by committed rows and the messages of workers are fenced."""
    while True:
        try:
            return await work(*args)
        except OSError as error:
            if not is_scarce(error):
                raise
            log.error("%s: %s; it is tried again in %g s", getattr(work, "__qualname__", work), error, SCARCE_S)
        await anyio.sleep(SCARCE_S)
