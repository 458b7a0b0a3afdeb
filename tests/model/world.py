"""The simulated world of one seed: the daemon's real services on a simulated wire, with workers, clients and faults.

Owner of: the virtual time, the one source of chance, the event log, the daemon's lives. Invariants: the services are wired by
`artd.services` and boot in the daemon's order; a crash drops everything but rows and files; two runs of a seed have the same
log, byte by byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from pathlib import Path
from typing import Any

import anyio

from artd import recover, workforce
from artd.check.run import check
from artd.config import Interpreter, Limits, Runtimes, Settings
from artd.datadir.layout import DataDir
from artd.net.router import WorkerWire
from artd.packing import child
from artd.services import Services
from artd.store.store import Store, set_meta
from artd_schema.run.spec import EngineSpec, RunSpec
from artd_schema.wire import worker as w
from tests.fakes.rows import VOCAB, data_dir

from .clients import Asker, Closer, Operator, Rollout, Watcher
from .history import History
from .net import Net, Weather
from .process import Process
from .virtual import Crashed, InlineReader, InlineWriter, VirtualClock
from .workers import WORKERS, Engine, Gateway

NOWHERE = Interpreter(python="/bin/false")
YEAR_S = 365 * 86400.0
WAYS: tuple[dict[str, tuple[w.Transfer, ...]], ...] = (
    {"trainer": ("gloo",), "engine": ("gloo",)},
    {"trainer": ("direct", "nccl", "stock"), "engine": ("direct", "nccl", "stock")},
    {"trainer": ("direct", "stock"), "engine": ("nccl", "stock")},
)
"""How trainer and engine can do their parts of a live push."""
STALL_S = 60.0
FAULTS = {
    "start": 0.05, "die": 0.06, "hang": 0.08, "stuck": 0.15, "transient": 0.05, "interrupted": 0.03, "full": 0.02, "permanent": 0.02,
    "damage": 0.02, "push": 0.05, "struck": 0.04, "server": 0.05, "feed": 0.05, "hold": 0.25, "stays": 0.1, "lost": 0.2,
}  # fmt: skip


class Life:
    """One boot of the daemon."""

    def __init__(self) -> None:
        self.crashed = asyncio.Event()
        self.stop = asyncio.Event()
        self.writers: list[InlineWriter] = []
        self.readers: list[InlineReader] = []
        self.stopped = False


class World:
    """What everybody in it shares. feeds: pushes that the trainer feeds; engines: by address."""

    def __init__(self, seed: int, root: Path) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._unhandled)
        self.clock = VirtualClock(self.loop)
        self.history = History(self.log)
        self.net = Net(self.rng, self.log)
        self.engines: dict[str, Engine] = {}
        self.gateway: Gateway | None = None
        self.feeds: set[tuple[int, int]] = set()
        self.data: DataDir = data_dir(root)
        self.settings = Settings(
            limits=Limits(min_free_mib=1, reserve_mib=0, stall_s=STALL_S),
            runtimes=Runtimes(trainer=NOWHERE, engine=NOWHERE),
            drain_s=5.0,
        )
        model = root / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB}))
        (model / "model.safetensors").write_bytes(b"no weights")
        self.spec = RunSpec(
            model=str(model), group_size=2, groups_per_step=self.rng.choice((1, 1, 2)), row_length=64, drop_longer=True, group_timeout_s=15.0,
            rollout_weights_mode=self.rng.choice(("merged", "lora")), push_drain_s=2.0, keep_checkpoints=self.rng.choice((1, 3)),
            engine=EngineSpec(replicas=self.rng.choice((1, 2))),
        )  # fmt: skip
        self.life = Life()
        self._processes: list[Process] = []
        self._numbers: dict[str, int] = {}
        self._faults = dict.fromkeys(FAULTS, 0.0)
        self._crash_at_point = 0.0
        self.ways: dict[str, tuple[w.Transfer, ...]] = self.rng.choice(WAYS)

    # ---- chance and record ------------------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        self.lines.append(f"{self.loop.time():.6f} {text}")

    def unlucky(self, fault: str) -> bool:
        """Whether this goes wrong now."""
        if self.rng.random() >= self._faults[fault]:
            return False
        self.log(f"fault    {fault}")
        return True

    def number(self, kind: str) -> str:
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return f"{kind}-{self._numbers[kind]}"

    def latency(self) -> float:
        """Seconds that the disk takes."""
        return self.rng.uniform(0.0005, 0.01)

    # ---- what the services stand on -----------------------------------------------------------------------------------------

    def spawn(
        self, name: str, argv: Any, env: dict[str, str], log: Path, *, cwd: Path, fds: Any, woken: Any
    ) -> Process:
        process = Process(self, env, woken, WORKERS)
        self._processes.append(process)
        self.log(f"process  {name}:{process.spawn} starts")
        return process

    def reach(self, point: str) -> None:
        """A crash point of production code."""
        if self.life.crashed.is_set():
            raise Crashed(point)
        rare = 0.3 if point.startswith("writer.") else 1.0  # every write passes there
        if self.rng.random() < rare * self._crash_at_point:
            self.crash(f"at {point}")
            raise Crashed(point)

    async def pack(self, request: child.PackRequest, stall_s: float = 0.0) -> child.PackResult:
        """The packing child, without its process."""
        await anyio.sleep(self.rng.uniform(0.01, 0.3))
        return child.run(request)

    def _open_writer(self, life: Life, path: Path, on_fatal: Any) -> InlineWriter:
        life.writers.append(InlineWriter(path, on_fatal, self.latency))
        return life.writers[-1]

    async def _open_reader(self, life: Life, path: Path) -> InlineReader:
        life.readers.append(InlineReader(path, self.latency))
        return life.readers[-1]

    def _open_readers(self, life: Life, path: Path, count: int, deadline_s: float | None) -> InlineReader:
        life.readers.append(InlineReader(path, self.latency))
        return life.readers[-1]

    # ---- the daemon ---------------------------------------------------------------------------------------------------------

    def crash(self, why: str) -> None:
        """The daemon's process is gone: nothing of it writes, sends or hears from here on."""
        self.log(f"crash    {why}")
        self.net.close()
        for writer in self.life.writers:
            writer.dead = True
        self.life.crashed.set()

    async def live_on(self) -> None:
        """One life of the daemon after the other, until cancelled."""
        while True:
            life = self.life = Life()
            boot = asyncio.ensure_future(self._boot(life))
            crashed = asyncio.ensure_future(life.crashed.wait())
            try:
                await asyncio.wait([boot, crashed], return_when=asyncio.FIRST_COMPLETED)
                if boot.done() and not life.crashed.is_set() and not life.stopped:
                    self.history.broken(f"the daemon ended: {boot.exception()!r}")
                    raise boot.exception() or AssertionError("the daemon ended by itself")
            finally:
                self.net.close()
                life.crashed.set()
                for task in (boot, crashed):
                    task.cancel()
                await asyncio.gather(boot, crashed, return_exceptions=True)
                for reader in life.readers:
                    await reader.close()
                for writer in life.writers:
                    writer.stop()
            await self._bury()

    async def _bury(self) -> None:
        """Guardians end the workers within a second; only then another daemon goes on."""
        for process in self._processes:
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))
            process.end(137)
        self._processes.clear()
        await asyncio.sleep(self.rng.uniform(0.0, 3.0))

    async def _boot(self, life: Life) -> None:
        store = Store(
            self.data.database, self.clock, self._fatal, functools.partial(self._open_writer, life),
            functools.partial(self._open_reader, life), functools.partial(self._open_readers, life),
        )  # fmt: skip
        await store.open()
        instance, number = await store.write(lambda c: recover.identify(c, self.data, self.clock.now_ms()))
        self.log(f"boot     {number}")
        await recover.recover(store, self.data)
        boot = workforce.Boot(
            instance=instance, number=number, code=self.data.code / "code", endpoint="", token="token"
        )
        services = Services(
            store, WorkerWire(self.net.workers), self.data, self.settings, boot, self.net.clients.send,
            lambda _: life.stop.set(), lambda _: None,
        )  # fmt: skip
        async with anyio.create_task_group() as group:
            services.start(group)
            group.start_soon(self.net.workers.run, services.take)
            group.start_soon(self.net.clients.run, lambda peer, request, bulk: services.ask(peer, request, bulk, 0))
            await life.stop.wait()
            await services.drain(self.settings.drain_s)
            group.cancel_scope.cancel()
        await store.write(lambda c: set_meta(c, "clean", "1"))
        life.stopped = True

    def _unhandled(self, _loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        dropped = "never retrieved" in context["message"] or error is None  # what a dead daemon left behind
        if not dropped and not isinstance(error, Crashed):
            self.history.broken(f"{context['message']}: {error!r}")

    def _fatal(self, error: BaseException) -> None:
        self.history.broken(f"the store failed: {error!r}")

    # ---- a whole seed -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Storms, then a quiet time in which everything must come true; ends early when a rule breaks."""
        story = asyncio.ensure_future(self._story())
        broken = asyncio.ensure_future(self.history.over.wait())
        await asyncio.wait([story, broken], return_when=asyncio.FIRST_COMPLETED)
        for task in (story, broken):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await story

    async def _story(self) -> None:
        rollouts, others = (
            (Rollout(self, "anna"), Rollout(self, "bert")),
            (Watcher(self, "cleo"), Operator(self, "dora"), Asker(self, "fred")),
        )
        async with asyncio.TaskGroup() as group:
            daemon = group.create_task(self.live_on())
            working = [group.create_task(person.run()) for person in rollouts]
            meddling = [group.create_task(person.run()) for person in others]
            for _ in range(self.rng.randint(2, 4)):
                await self._storm()
            self._calm()
            for task in meddling:
                task.cancel()
            await Closer(self, "emil").run()
            for task in (*working, daemon):
                task.cancel()
        await self._bury()

    def audit(self) -> None:
        """The books at the end, outside the simulation."""
        self.history.close()
        report = check(self.data.root, deep=True)
        if not report.clean:
            self.history.broken(f"artd check: {report.broken}")

    async def _storm(self) -> None:
        rng = self.rng
        self.net.weather = Weather.storm(rng)
        self._faults = {name: chance * rng.choice((0.0, 1.0, 2.0)) for name, chance in FAULTS.items()}
        self._crash_at_point = rng.choice((0.0, 0.002, 0.02))
        self.log(f"storm    {self.net.weather}")
        await asyncio.sleep(rng.uniform(2.0, 25.0))
        match rng.choice(("crash", "stop", "kill", "jump")):
            case "crash":
                if not self.life.crashed.is_set():
                    self.crash("by chance")
            case "stop":
                self.log("stop")
                self.life.stop.set()
            case "kill":
                for process in self._processes:
                    if rng.random() < 0.5:
                        process.end(137)
            case "jump":
                self.clock.offset_s += rng.choice((-YEAR_S, -30.0, 30.0, YEAR_S))
                self.log(f"jump     {self.clock.offset_s}")

    def _calm(self) -> None:
        self.net.weather = Weather()
        self._faults = dict.fromkeys(FAULTS, 0.0)
        self._crash_at_point = 0.0
        self.log("calm")
