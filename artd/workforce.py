"""Decides which workers run, creates their processes, and handles their Hello, Ready and death.

Owns process rows. A spawn number is durable before its process exists. A message of an older process of its name does
not count. The services learn of a death after it is proven.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import socket
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from artd.datadir.layout import DataDir
from artd.net.router import WorkerWire
from artd.runtimes import registry
from artd.serving.gateway_file import write_gateway_file
from artd.store.store import Store, emit, set_meta
from artd.store.views import active_run, active_run_ids, route_shape, stored_spec
from artd.supervise.environment import TRAINER_EXTRA, Tags, child_environment
from artd.supervise.lease import Holder, heartbeat_s
from artd.supervise.packages import NO_PACKAGES, Packages
from artd.supervise.postmortem import Status
from artd.supervise.reap import Leftover
from artd.supervise.spawn import Undead
from artd.supervise.spec import Info, Launch, Spec
from artd.supervise.states import State
from artd.supervise.supervisor import Supervisor
from artd.supervise.worker import ERROR_LINES
from artd.tables.processes import note_missing, note_state, number_spawn, set_address
from artd_schema import PROTOCOL
from artd_schema.data.base import BaseModel
from artd_schema.run.engines import DEFAULT
from artd_schema.run.scratch import sweep
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import EngineConfig, GatewayConfig, TrainerConfig
from artd_schema.wire.worker_names import GATEWAY, parse_worker

from .config import Settings
from .crew import Crew, find_interpreter, load_crew, visible_gpus
from .errors import Conflict, RequestError

log = logging.getLogger(__name__)
MODULES: dict[str, str] = {
    "trainer": "artd_workers.trainer",
    "engine": "artd_workers.engines",
    "gateway": "artd_workers.gateway",
}
START_S = {"trainer": 300.0, "engine": 600.0, "gateway": 60.0}
Death = Callable[[str, int, bool, str, str], Awaitable[None]]
"""(name, spawn, whether it was ordered, why, last lines of its log)"""


@dataclass(frozen=True, kw_only=True)
class Boot:
    """What every process of this boot is told: `code` is the folder with the workers' code, `endpoint` that of the worker ROUTER,
    `leftovers` are processes of older boots that outlived SIGKILL, `listener` is the gateway's, `packages` what installed ones bring."""

    instance: str
    number: int
    code: Path
    endpoint: str
    token: str
    leftovers: tuple[Leftover, ...] = ()
    listener: socket.socket | None = None
    packages: Packages = NO_PACKAGES


@dataclass
class Words:
    """The last words of one process: why it, or the server that it kept, ended."""

    spawn: int = -1
    error: str = ""


@dataclass
class Workforce:
    """Listens to the supervisor, and registers the workers that connect. `announce(url)` reports that the gateway can
    be reached there."""

    store: Store
    wire: WorkerWire
    data: DataDir
    settings: Settings
    boot: Boot
    announce: Callable[[str], None]
    on_death: Death
    gateway_ready: anyio.Event = field(default_factory=anyio.Event)
    stopping: bool = False
    _supervising: bool = False
    _crews: dict[int, Crew] = field(default_factory=dict)
    _leaving: set[str] = field(default_factory=set)
    _downs: dict[str, Words] = field(default_factory=dict)
    _ends: dict[str, Words] = field(default_factory=dict)

    async def run(self) -> None:
        """Supervise, and start and stop workers as the rows ask, until cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            self.supervisor = Supervisor(group, self, clock=self.store.clock.monotonic)
            self._add(GATEWAY, start=not self.stopping)
            self._supervising = True
            await self._follow_rows()

    def _add(self, name: str, start: bool = False) -> None:
        """Supervise a worker. Until GPUs are leased, it does not start beside a process of an older boot that does not die and is of
        its kind, whichever worker's that was: it may hold what this one needs."""
        kind = parse_worker(name).kind
        left = tuple(each for each in self.boot.leftovers if each.name.partition("-")[0] == kind)
        launch = functools.partial(self._launch, name)
        spec = Spec(name=name, kind=kind, launch=launch, start_timeout_s=START_S[kind], leftovers=left)
        self.supervisor.add(spec, start=start)

    async def _follow_rows(self) -> None:
        while not self.stopping:
            changed = self.store.change()
            runs = await self.store.write(active_run_ids)
            await self._end_others(runs)
            for run in runs:
                if not self.stopping:
                    await self._man(run)
            with anyio.move_on_after(5.0):
                await changed.wait()

    async def _end_others(self, runs: Collection[int]) -> None:
        """End the workers of all other runs. A worker never works for another run."""
        for name in self.supervisor.names():
            if name == GATEWAY or parse_worker(name).run in runs or self.stopping:
                continue
            if name not in self._leaving:
                self._leaving.add(name)
                await self._stop(name, "the run is finished")
            if self.supervisor.state(name) == "stopped":
                self.supervisor.drop(name)
                self._leaving.discard(name)
        kept = {parse_worker(name).run for name in self.supervisor.names()}
        self._crews = {run: crew for run, crew in self._crews.items() if run in kept}

    async def _man(self, run: int) -> None:
        """Start the workers of a run that can be started."""
        if run not in self._crews:
            self._crews[run] = await load_crew(self.store, self.data.root, self.boot.packages, run)
        crew = self._crews[run]
        for name in [name for name in crew.workers if name not in self.supervisor.names()]:
            self._add(name)
        # These checks read the disk, so they run only for workers without a process, not at every change.
        idle = [name for name in crew.workers if self.supervisor.state(name) not in ("starting", "ready")]
        if not idle or not await self._has_base(crew, idle):
            return
        for name in idle:
            if await self._has_place(name) and await self._has_runtime(name, crew.engine) and not self.stopping:
                self.supervisor.start(name)

    async def _has_place(self, name: str) -> bool:
        """Return whether no process of a finished run may hold what this worker needs. Leases will answer this exactly."""
        kind = parse_worker(name).kind
        for other in self._leaving:
            if parse_worker(other).kind == kind:
                await self._note_missing(
                    name, f"{other}, of a finished run, has not ended; artd continues by itself then"
                )
                return False
        return True

    async def _stop(self, name: str, reason: str) -> None:
        try:
            await self.supervisor.stop(name, self.settings.drain_s, reason)
        except Undead as error:
            log.error("%s", error)  # the worker is broken until the process is gone, so no second one starts beside it

    # ---- making a process ---------------------------------------------------------------------------------------------

    def require_runtimes(self, engine: str) -> None:
        """Raise RequestError, with the command to type, when the runtime of the trainer or of this kind of engine is missing."""
        kinds: tuple[w.WorkerKind, ...] = ("trainer", "engine")
        for kind in kinds:
            try:
                self._interpreter(kind, engine)
            except registry.RuntimeMissing as error:
                raise RequestError(str(error)) from None

    async def _has_base(self, crew: Crew, names: Sequence[str]) -> bool:
        """Return whether the run's base model is unchanged. If not, stop these workers until it is: a failed start
        counts as a death."""
        try:
            await anyio.to_thread.run_sync(crew.base.check)
        except Conflict as error:
            text = f"{error.message}; artd continues by itself then"
            for name in names:
                if self.supervisor.state(name) != "broken":
                    await self._stop(name, text)
                    await self._note_missing(name, text)
            return False
        return True

    async def _has_runtime(self, name: str, engine: str) -> bool:
        """Return whether there is an interpreter for the worker; its row says why not. `engine` is the kind of its run's engines."""
        try:
            self._interpreter(parse_worker(name).kind, engine)
        except registry.RuntimeMissing as error:
            text = str(error)
            await self._note_missing(name, text)
            return False
        return True

    async def _note_missing(self, name: str, text: str) -> None:
        """Say in the worker's row, and once in an event, why it cannot be started."""

        def write(c: sqlite3.Connection) -> None:
            now = self.store.clock.now_ms()
            if note_missing(c, now, name, self.boot.number, text):
                emit(c, now, "", "worker.missing", name, error=text)

        await self.store.write(write)

    def _interpreter(self, kind: w.WorkerKind, engine: str) -> tuple[str, list[str]]:
        return find_interpreter(self.settings.runtimes, kind, engine)

    def _launch(self, name: str, spawn: int) -> Launch:
        """Return how to start a process of the worker. Raises FileNotFoundError when the runtime has gone, or the base model was
        changed, since they were looked for."""
        worker = parse_worker(name)
        kind, crew = worker.kind, self._crews.get(worker.run)
        try:
            python, site_paths = self._interpreter(kind, crew.engine if crew else DEFAULT)
            if crew is not None:
                crew.base.look()
        except (registry.RuntimeMissing, Conflict) as error:
            raise FileNotFoundError(str(error)) from None
        folder = self.data.spawn_dir(name, spawn)
        tags = Tags(
            instance=self.boot.instance, boot=self.boot.number, spawn=spawn, worker=name, build=self.boot.code.name,
            socket=self.boot.endpoint,
        )  # fmt: skip
        extra = (TRAINER_EXTRA if kind == "trainer" else {}) | visible_gpus(self.settings.gpus, worker, crew)
        listener = self.boot.listener if kind == "gateway" else None
        fds = () if listener is None else (listener.fileno(),)
        extra |= {w.LISTENER: str(fds[0])} if fds else {}
        code = crew.code.folders(self.data.code) if crew and kind == "trainer" else []
        env = child_environment(
            os.environ, tags, code=self.boot.code, tmpdir=folder, site_paths=[*site_paths, *code], extra=extra,
            drop=self.settings.environment.drop, keep=self.settings.environment.keep,
        )  # fmt: skip
        return Launch(argv=(python, "-m", MODULES[kind]), env=env, log=self.data.log(name), tmpdir=folder, fds=fds)

    # ---- the supervisor's listener ------------------------------------------------------------------------------------

    async def next_spawn(self, name: str) -> int:
        def write(c: sqlite3.Connection) -> int:
            return number_spawn(c, self.store.clock.now_ms(), name, self.boot.number)

        return await self.store.write(write)

    async def on_state(self, name: str, state: State, info: Info) -> None:
        end = self._ends.get(name, Words())
        error = end.error if info.error and end.spawn == info.spawn and end.error else info.error

        def write(c: sqlite3.Connection) -> None:
            now = self.store.clock.now_ms()
            note_state(c, now, name, self.boot.number, state, info, error)
            emit(c, now, "", f"worker.{state}", name, spawn=info.spawn, pid=info.pid, error=error)

        await self.store.write(write)

    async def on_exit(self, name: str, spawn: int, status: Status, ordered: bool, tail: str) -> None:
        self.wire.forget(name, spawn)
        down = self._downs.get(name, Words())
        error = down.error if down.spawn == spawn and down.error else status.text
        if not ordered and error == status.text and tail:
            error = "\n".join([error, *tail.splitlines()[-ERROR_LINES:]])
        self._ends[name] = Words(spawn, error)
        log.log(logging.INFO if ordered else logging.WARNING, "%s (spawn %d) ended: %s", name, spawn, error)
        if parse_worker(name).kind == "engine":
            sweep(self.data.scratch_record(name))
        await self.on_death(name, spawn, ordered, error, tail)

    # ---- what workers say ---------------------------------------------------------------------------------------------

    async def hello(self, peer: bytes, message: w.Hello) -> None:
        """Register a process, or tell it why it is rejected."""
        known = message.name in self.supervisor.names() and self.supervisor.info(message.name).spawn == message.spawn
        if message.protocol != PROTOCOL or not known or message.instance != self.boot.instance:
            who = f"{message.name} spawn {message.spawn} protocol {message.protocol} of instance {message.instance}"
            self.wire.answer(peer, w.Reject(reason=f"{who} is not the one that this daemon started"))
            return
        welcome = await self.store.write(lambda c: self._welcome(c, message))
        if self._ends.get(message.name, Words()).spawn >= message.spawn:
            return  # it died meanwhile; a process that is registered now would count as alive for ever
        self.wire.register(message.name, message.spawn, peer)
        self.wire.send(message.name, welcome)

    def _welcome(self, c: sqlite3.Connection, message: w.Hello) -> w.Welcome | w.Reject:
        base: dict[str, Any] = {
            "worker": message.name,
            "heartbeat_s": heartbeat_s(self.settings.limits.lease_s),
            "max_message": self.settings.limits.max_message_mib << 20,
        }
        kind, number, _ = parse_worker(message.name)
        if kind == "gateway":
            return w.Welcome(gateway=GatewayConfig(token=self.boot.token), **base)
        run, crew = active_run(c, number), self._crews.get(number)
        if run is None or crew is None:
            return w.Reject(reason=f"the run of {message.name} is not active")
        spec = stored_spec(run)
        pinned = msgspec.json.decode(run["base_manifest"], type=BaseModel)
        if kind == "trainer":
            named: dict[str, Any] = {"run": run["name"], "base_digest": run["base_digest"], "base": pinned}
            named |= {"loss": crew.code.loss, "family": crew.code.family}
            return w.Welcome(trainer=TrainerConfig(spec=spec, **named), **base)
        python, _ = self._interpreter("engine", spec.engine.kind)
        folder = self.data.spawn_dir(message.name, message.spawn)
        config = EngineConfig(
            run=run["name"], spec=spec, dir=str(folder), log=str(self.data.server_log(message.name)), python=python,
            routes=route_shape(run), stall_s=self.settings.limits.engine_stall_s, base=pinned,
        )  # fmt: skip
        return w.Welcome(engine=config, **base)

    async def ready(self, name: str, spawn: int, message: w.Ready) -> None:
        """Note that a worker can take work. Its address is in its row before the services see it as ready."""
        address = message.socket or message.url

        def write(c: sqlite3.Connection) -> None:
            set_address(c, name, address)
            if message.obstacle:
                emit(c, self.store.clock.now_ms(), "", "push.obstacle", name, spawn=spawn, obstacle=message.obstacle)
            if name == GATEWAY:
                set_meta(c, "gateway_url", message.url)
                set_meta(c, "gateway_port", message.url.rsplit(":", 1)[-1])

        await self.store.write(write)
        if message.obstacle:
            log.warning("%s is pushed to %s: %s", name, " or ".join(message.transfers) or "from disk", message.obstacle)
        if name == GATEWAY:
            await anyio.to_thread.run_sync(write_gateway_file, self.data.root, message.url, self.boot.token)
            self.announce(message.url)
            self.gateway_ready.set()
        await self.supervisor.ready(name, spawn)

    def down(self, name: str, spawn: int, message: w.Down) -> None:
        self._downs[name] = Words(spawn, f"{message.error}\n{message.tail}".strip())

    def revive(self) -> None:
        """Start broken workers again, as the operator wants. Earlier deaths no longer count, not even that of a worker
        which is dying now: a failed push pauses its run before the engine's process has ended."""
        for name in self.supervisor.names():
            if self.supervisor.state(name) not in ("stopped", "draining"):
                self.supervisor.retry_broken(name)

    def mend(self, endpoint: str) -> None:
        """Use the new runtime folder: `endpoint` for the next processes, new scratch folders for those that live."""
        self.boot = dataclasses.replace(self.boot, endpoint=endpoint)
        for holder in self.holders():
            self.data.spawn_dir(holder.name, holder.spawn).mkdir(mode=0o700, parents=True, exist_ok=True)

    def holders(self) -> list[Holder]:
        """Return the workers that owe heartbeats."""
        living = [name for name in self.supervisor.names() if self.supervisor.state(name) == "ready"]
        return [Holder(name, self.supervisor.info(name).spawn) for name in living]

    def kill(self, name: str, reason: str, spawn: int | None = None, traced: bool = False) -> None:
        """Order the death of a worker, or only of its process `spawn`. It starts again. `traced`: its log first shows
        where it hangs."""
        log.warning("killing %s: %s", name, reason)
        self._group.start_soon(self._kill, name, reason, spawn, traced)

    async def _kill(self, name: str, reason: str, spawn: int | None, traced: bool) -> None:
        try:
            await self.supervisor.kill(name, spawn, reason, traced)
        except Undead as error:
            log.error("%s", error)  # the worker is broken now, and its row says so

    async def stop_all(self, grace_s: float) -> None:
        self._leave()
        for name in self.supervisor.names() if self._supervising else ():
            self.wire.send(name, w.Exit(grace_s=grace_s))
        await self._stop_all(grace_s, "the daemon is stopping")

    async def kill_all(self) -> None:
        self._leave()
        await self._stop_all(0.0, "the daemon was told twice to stop")

    def _leave(self) -> None:
        self.stopping = True
        if self.boot.listener is not None:
            self.boot.listener.close()  # so a client that connects while the gateway ends is refused, and retries

    async def _stop_all(self, grace_s: float, reason: str) -> None:
        if self._supervising:  # otherwise the daemon stops while it boots, and no worker was started
            await self.supervisor.stop_all(grace_s, reason)
