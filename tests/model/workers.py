"""Workers without processes: a trainer, an engine and a gateway that speak the real messages over a simulated wire.

Owner of: what each of them holds in memory; it ends with its process. Invariants: whatever goes wrong is drawn from the
world's chance; a process that was killed does nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from artd.supervise import procfs
from artd_schema import PROTOCOL
from artd_schema import worker as w
from artd_schema.manifest import BatchManifest
from artd_schema.trajectory import Sampling
from tests.fakes.rows import turn
from tests.fakes.staging import stage

from .history import Result

if TYPE_CHECKING:
    from .world import World

HELLO_S = 20.0
LEDGER_S = 10.0
BEAT_S = 7.0
HANG_S = 90.0


class Process:
    """What the supervisor takes for a guardian with its subtree. reported: (job, fence) of jobs that it reported."""

    def __init__(self, world: World, env: Mapping[str, str], woken: Callable[[], None]) -> None:
        self.name, self.spawn, self.instance = env["ARTD_WORKER"], int(env["ARTD_SPAWN"]), env["ARTD_INSTANCE"]
        self.who = procfs.Identity("simulated", 1000 + self.spawn, 1)
        self.session = self.who.pid
        self.code: int | None = None
        self.reported: set[tuple[int, int]] = set()
        self._world = world
        self._life = world.life
        self._woken = woken
        self._tasks: list[asyncio.Task[Any]] = []
        self.worker = WORKERS[self.name](world, self)
        self.do(self._main())

    @property
    def ended(self) -> bool:
        return self.code is not None

    exited = ended

    def do(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something that this process does beside the rest."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._look)
        self._tasks.append(task)

    def _look(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._world.history.broken(f"the simulated {self.name} failed: {error!r}")

    async def _main(self) -> None:
        self.end(await self.worker.run())

    def end(self, code: int) -> None:
        """The process is gone."""
        if self.ended:
            return
        self.code = code
        self._world.log(f"process  {self.name}:{self.spawn} ends with {code}")
        self.worker.leave()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._woken()

    def die(self) -> NoReturn:
        """End in the middle of one's own work."""
        self.end(139)
        raise asyncio.CancelledError

    def tail(self, lines: int = 0) -> str:
        return ""

    def terminate(self) -> None:
        asyncio.get_running_loop().call_later(self._world.rng.uniform(0.0, 1.0), self.end, 143)

    async def kill(self, within_s: float = 0.0) -> int:
        if self._life.crashed.is_set():
            return 137  # a dead daemon kills nobody; the guardians do, see World
        if not self.ended:
            await asyncio.sleep(self._world.rng.uniform(0.0, 0.1))
            self.end(137)
        assert self.code is not None
        return self.code


class Worker:
    """One end of the wire. `serve` is the worker's own work."""

    kind: w.WorkerKind

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process = world, process
        self.peer = f"{process.name}:{process.spawn}".encode()
        self.inbox: asyncio.Queue[w.ToWorker] = asyncio.Queue()
        self.hung = False
        world.net.workers.join(self.peer, lambda _, message, bulk: self.inbox.put_nowait(message))

    def leave(self) -> None:
        self.world.net.workers.leave(self.peer)

    def tell(self, message: w.FromWorker, bulk: list[bytes] | None = None) -> None:
        self.world.net.workers.tell(self.peer, message, bulk or [])

    async def run(self) -> int:
        """Exit status."""
        await asyncio.sleep(self.world.rng.uniform(0.01, 1.0))
        if self.world.unlucky("start"):
            return 1
        process = self.process
        self.tell(
            w.Hello(
                kind=self.kind, name=process.name, protocol=PROTOCOL, spawn=process.spawn, instance=process.instance,
                pid=process.who.pid, build="",
            )
        )  # fmt: skip
        try:
            async with asyncio.timeout(HELLO_S):
                while not isinstance(welcome := await self.inbox.get(), w.Welcome):
                    if isinstance(welcome, w.Reject):
                        return 1
        except TimeoutError:
            return 1
        self.process.do(self._beat())
        return await self.serve(welcome)

    async def _beat(self) -> None:
        while True:
            if not self.hung:
                self.tell(w.Beat(job=self.job))
            await asyncio.sleep(BEAT_S)

    job = 0

    async def hang(self) -> None:
        """Nothing at all for a while, as a stopped process."""
        self.hung = True
        await asyncio.sleep(HANG_S)
        self.hung = False

    async def serve(self, welcome: w.Welcome) -> int:
        raise NotImplementedError


class Trainer(Worker):
    """resident: digest of the checkpoint that its memory holds, "" when it is none."""

    kind = "trainer"

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world, process)
        self.resident = ""
        self._cancelled: set[tuple[int, int]] = set()
        self._verdict = asyncio.Event()
        self._waits: tuple[int, int] = (0, 0)

    async def serve(self, welcome: w.Welcome) -> int:
        assert welcome.trainer is not None
        self.tell(w.Ready())
        seen: set[tuple[int, int]] = set()
        while True:
            match await self.inbox.get():
                case w.Run() as order if (order.job, order.fence) not in seen:
                    seen.add((order.job, order.fence))
                    self.process.do(self._work(order, welcome.trainer))
                case w.Cancel(job=job, fence=fence):
                    self._cancelled.add((job, fence))
                case w.Committed() as message:
                    self.world.history.committed(message)
                    if self._settle(message.job, message.fence):
                        self.resident = message.checkpoint.sha
                case w.Fenced(job=job, fence=fence) | w.Ack(job=job, fence=fence):
                    self._settle(job, fence)
                case w.Push() as push:
                    if push.checkpoint.sha == self.resident:
                        self.world.feeds.add((push.push, push.fence))
                    else:
                        self.tell(w.Refused(push=push.push, fence=push.fence, reason="not resident"))
                case w.Exit():
                    return 0

    def _settle(self, job: int, fence: int) -> bool:
        if self._waits != (job, fence):
            return False
        self._verdict.set()
        return True

    async def _work(self, order: w.Run, config: w.TrainerConfig) -> None:
        self.job, self.resident = order.job, ""
        self.world.history.ordered(order, self.process)
        self.tell(w.Accepted(job=order.job, fence=order.fence))
        trained = self._read(order)
        await asyncio.sleep(self.world.rng.uniform(0.05, 2.0))
        report = await self._result(order, config, trained)
        self._waits = (order.job, order.fence)
        self._verdict.clear()
        self.process.reported.add(self._waits)
        while not self._verdict.is_set():
            self.tell(report)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._verdict.wait(), 1.0)
        self.job = 0

    def _read(self, order: w.Run) -> tuple[int, ...]:
        """Ids of the batch's trajectories, when its files and the parent's are there."""
        if order.parent is None:
            return ()
        for path in (Path(order.parent.dir) / "manifest.json", Path(order.batch), Path(order.manifest)):
            if not path.is_file():
                self.world.history.broken(f"job {order.job} was ordered, and {path.name} is not there")
        manifest = msgspec.json.decode(Path(order.manifest).read_bytes(), type=BatchManifest)
        return tuple(packed.id for packed in manifest.trajectories if packed.rows)

    async def _result(self, order: w.Run, config: w.TrainerConfig, trained: tuple[int, ...]) -> w.Staged | w.Failed:
        world, folder = self.world, Path(order.dir)
        for failure in ("transient", "interrupted", "permanent"):
            if world.unlucky(failure):
                return w.Failed(job=order.job, fence=order.fence, failure=failure, error=f"told to: {failure}")
        if (order.job, order.fence) in self._cancelled:
            return w.Failed(job=order.job, fence=order.fence, failure="interrupted", error="cancelled")
        if world.unlucky("die"):
            if world.rng.random() < 0.5:
                folder.mkdir(parents=True)
                (folder / "weights.bin").write_bytes(b"half")
            self.process.die()
        if world.unlucky("hang"):
            await self.hang()
        sha = stage(folder, order, config.base_digest, run=config.run)
        world.history.staged(sha, Result(order, trained))
        if world.unlucky("damage"):
            (folder / "weights.bin").write_bytes(b"other bytes")
        if world.unlucky("die"):
            self.process.die()
        await asyncio.sleep(world.rng.uniform(0.0, 0.5))
        return w.Staged(job=order.job, fence=order.fence, dir=order.dir, manifest_sha=sha, metrics={"loss": 0.5})


class Engine(Worker):
    """weights: digest of what is served in merged mode; adapters: by name in lora mode."""

    kind = "engine"

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world, process)
        self.weights = "base"
        self.adapters: dict[str, str] = {}
        self._paused = False
        self._fence = 0
        self._in_flight = 0

    def leave(self) -> None:
        super().leave()
        self.world.engines.pop(f"engine:{self.process.spawn}", None)

    async def serve(self, welcome: w.Welcome) -> int:
        address = f"engine:{self.process.spawn}"
        self.world.engines[address] = self
        self.tell(w.Ready(socket=address))
        while True:
            match await self.inbox.get():
                case w.Push() as push if push.fence > self._fence:
                    self._fence = push.fence
                    if not await self._take(push):
                        return 1
                case w.Unload(name=name):
                    self.adapters.pop(name, None)
                case w.Exit():
                    return 0

    async def _take(self, push: w.Push) -> bool:
        """Whether the engine is still good afterwards."""
        world = self.world
        if world.unlucky("hang"):
            await self.hang()
        if push.mode == "merged":
            self._paused = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(push.drain_s):
                    while self._in_flight:
                        await asyncio.sleep(0.1)
            self.weights = "half"
        if push.source == "live":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(push.deadline_s):
                    while (push.push, push.fence) not in world.feeds:
                        await asyncio.sleep(0.2)
        elif not (Path(push.checkpoint.dir) / "manifest.json").is_file():
            world.history.broken(f"push {push.push} names {push.name}, whose files are not there")
        await asyncio.sleep(world.rng.uniform(0.01, 0.5))
        if world.unlucky("push"):
            self.tell(w.PushFailed(push=push.push, fence=push.fence, phase="verify", error="told to fail"))
            await asyncio.sleep(0.1)
            return False
        if push.mode == "merged":
            self.weights, self._paused = push.checkpoint.sha, False
        else:
            self.adapters[push.name] = push.checkpoint.sha
        self.tell(w.Live(push=push.push, fence=push.fence, max_abs=1e-6, mean_abs=1e-7))
        return True

    async def generate(self, mode: str, name: str) -> str:
        """Digest of the weights that a response came from; "" when there is none."""
        before = self._held(mode, name)
        if self._paused or not before:
            return ""
        self._in_flight += 1
        await asyncio.sleep(self.world.rng.uniform(0.01, 1.0))
        self._in_flight -= 1
        return before if not self.process.ended and self._held(mode, name) == before else ""

    def _held(self, mode: str, name: str) -> str:
        return self.weights if mode == "merged" else self.adapters.get(name, "")


class Gateway(Worker):
    """Routes by the newest table; what it holds, it does not send to."""

    kind = "gateway"

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world, process)
        self._route = w.Route(seq=-1, runs=(), engines=())
        self._held: set[str] = set()
        self._acks: dict[str, asyncio.Future[str]] = {}

    def leave(self) -> None:
        super().leave()
        if self.world.gateway is self:
            self.world.gateway = None

    async def serve(self, welcome: w.Welcome) -> int:
        self.world.gateway = self
        self.tell(w.Ready(url="http://127.0.0.1:1234"))
        while True:
            match await self.inbox.get():
                case w.Route() as route:
                    if route.seq > self._route.seq:
                        self._route = route
                        self._held = {engine.engine for engine in route.engines if engine.hold}
                    self.tell(w.RouteTaken(seq=self._route.seq))
                case w.Hold(push=push, engine=engine):
                    self._held.add(engine)
                    self.tell(w.Held(push=push, engine=engine, in_flight=0))
                case w.ExchangeAck(response_id=name, error=error) if name in self._acks:
                    if not self._acks[name].done():
                        self._acks[name].set_result(error)
                case w.Exit():
                    return 0

    async def respond(self, run: str) -> str:
        """Serve one request: id of a response that is in the ledger, "" when it failed."""
        place = next(
            (engine for engine in self._route.engines if engine.engine not in self._held and engine.served), None
        )
        engine = self.world.engines.get(place.socket) if place else None
        if place is None or engine is None:
            return ""
        served = place.served[-1]
        weights = await engine.generate(place.mode, served.name)
        if not weights or self.process.ended:
            return ""
        self.world.history.generated(served.name, weights)
        name = self.world.number("response")
        message = w.Exchange(
            response_id=name, run=run, model=served.name, split="train", sampling=Sampling(), choices=1, prompt_tokens=2,
            completion_tokens=2, seconds=0.1,
        )  # fmt: skip
        made = turn(policy_epoch=((0, served.epoch),), response_id=name, raw=name.encode())
        ack = self._acks[name] = asyncio.get_running_loop().create_future()
        self.tell(message, [msgspec.msgpack.encode(made)])
        try:
            error = await asyncio.wait_for(ack, LEDGER_S)
        except TimeoutError:
            return ""
        finally:
            del self._acks[name]
        if error or self.process.ended:
            return ""
        self.world.history.responses.add(name)
        return name


WORKERS: dict[str, type[Worker]] = {"trainer": Trainer, "engine": Engine, "gateway": Gateway}
