"""Workers without processes: a trainer, an engine and a gateway that speak the real messages over a simulated wire.

Owner of: what each of them holds in memory; it ends with its process. Invariants: whatever goes wrong is drawn from the
world's chance; an engine is paused for a push only after its `Proceed`.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from artd_schema.data.manifest import BatchManifest
from artd_schema.data.trajectory import Sampling
from artd_schema.wire import worker as w
from artd_schema.wire.deliveries import Delivery, Recall, Recalled
from artd_schema.wire.worker_config import TrainerConfig
from tests.fakes.rows import turn
from tests.fakes.staging import stage

from .history import Result
from .process import Process, Worker

if TYPE_CHECKING:
    from .world import World

LEDGER_S = 10.0


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
        self.tell(w.Ready(transfers=self.world.ways["trainer"]))
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
                    self.process.do(self._feed(push))
                case w.Exit():
                    return 0

    async def _feed(self, push: w.Push) -> None:
        """Give the weights, as long as they are there: which of them, `resident` says when the engine has taken the last one."""
        if push.transfer not in self.world.ways["trainer"]:
            self.world.history.broken(f"push {push.push} goes by {push.transfer}, which this trainer cannot do")
        await asyncio.sleep(self.world.rng.uniform(0.0, 1.0))
        if self.world.unlucky("feed"):
            self.process.die()
        if push.checkpoint.sha != self.resident:
            return self.tell(w.Refused(push=push.push, fence=push.fence, reason="not resident"))
        if self.world.unlucky("feed"):
            return self.tell(w.Refused(push=push.push, fence=push.fence, reason="told to", transfer=push.transfer))
        self.world.feeds.add((push.push, push.fence))
        return None

    def _settle(self, job: int, fence: int) -> bool:
        if self._waits != (job, fence):
            return False
        self._verdict.set()
        return True

    async def _work(self, order: w.Run, config: TrainerConfig) -> None:
        self.job, self.fence, self.progress, self.resident = order.job, order.fence, 0, ""
        self.world.history.ordered(order, self.process)
        self.tell(w.Accepted(job=order.job, fence=order.fence))
        trained = self._read(order)
        await asyncio.sleep(self.world.rng.uniform(0.05, 2.0))
        self.progress += 1
        report = await self._result(order, config, trained)
        self._waits = (order.job, order.fence)
        self._verdict.clear()
        self.process.reported.add(self._waits)
        while not self._verdict.is_set():
            self.tell(report)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._verdict.wait(), 1.0)
        self.job = self.fence = self.progress = 0

    def _read(self, order: w.Run) -> tuple[int, ...]:
        """Ids of the batch's trajectories, when its files and the parent's are there."""
        if order.parent is None:
            return ()
        for path in (Path(order.parent.dir) / "manifest.json", Path(order.batch), Path(order.manifest)):
            if not path.is_file():
                self.world.history.broken(f"job {order.job} was ordered, and {path.name} is not there")
        manifest = msgspec.json.decode(Path(order.manifest).read_bytes(), type=BatchManifest)
        return tuple(packed.id for packed in manifest.trajectories if packed.rows)

    async def _result(self, order: w.Run, config: TrainerConfig, trained: tuple[int, ...]) -> w.Staged | w.Failed:
        world, folder = self.world, Path(order.dir)
        for failure in ("transient", "interrupted", "full", "permanent"):
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
        if world.unlucky("stuck"):
            await asyncio.Event().wait()  # and its heartbeats go on
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
        self.world.engines.pop(f"{self.process.name}:{self.process.spawn}", None)

    async def serve(self, welcome: w.Welcome) -> int:
        address = f"{self.process.name}:{self.process.spawn}"
        self.world.engines[address] = self
        self.tell(w.Ready(socket=address, transfers=self.world.ways["engine"]))
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
            if (answer := await self._hold(push)) is None:
                return False
            if isinstance(answer, w.Exit):
                self.inbox.put_nowait(answer)
                return True
            self._paused = True
            self._strike()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(push.drain_s):
                    while self._in_flight:
                        await asyncio.sleep(0.1)
            self.weights = "half"
            self._strike()
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
            if world.unlucky("stays"):
                await asyncio.sleep(3600.0)  # and beats
            await asyncio.sleep(0.1)
            return False
        self._strike()
        if push.mode == "merged":
            self.weights, self._paused = push.checkpoint.sha, False
        else:
            self.adapters[push.name] = push.checkpoint.sha
        self._strike()
        self.tell(w.Live(push=push.push, fence=push.fence, max_abs=1e-6, mean_abs=1e-7))
        return True

    async def _hold(self, push: w.Push) -> w.Proceed | w.Exit | None:
        """Ask for the hold, and serve on until the answer; None at the deadline (it, or the question, was lost), and when the
        server dies meanwhile."""
        self._strike()
        self.tell(w.Pausing(push=push.push, fence=push.fence))
        if self.world.unlucky("server"):
            await asyncio.sleep(self.world.rng.uniform(0.0, 0.02))
            return await self._lost(push, "the engine ended")
        go_on = w.Proceed(push=push.push, fence=push.fence)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(push.deadline_s):
                while not isinstance(answer := await self.inbox.get(), w.Exit) and answer != go_on:
                    pass
                return answer if isinstance(answer, w.Exit) else go_on
        return await self._lost(push, "nobody said Proceed")

    async def _lost(self, push: w.Push, error: str) -> None:
        """There is no engine left to be paused."""
        self.tell(w.PushFailed(push=push.push, fence=push.fence, phase="hold", error=error))
        await asyncio.sleep(0.1)
        self.tell(w.Down(error=error))

    def _strike(self) -> None:
        """Somebody may kill the process here."""
        if self.world.unlucky("struck"):
            self.process.die()

    async def generate(self, mode: str, name: str) -> str:
        """Digest of the weights that a response came from; "" when there is none."""
        before = self._held(mode, name)
        if self._paused and self.world.net.ordered:
            self.world.history.broken(
                f"a request was admitted to {self.process.name}:{self.process.spawn}, which is paused"
            )
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
        self._recalls: dict[int, asyncio.Future[Recalled]] = {}
        self._asked = 0

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
                case w.Hold(push=push, fence=fence, engine=engine):
                    if self.world.unlucky("hold"):
                        await self._fall(engine)
                    self._held.add(engine)
                    self.tell(w.Held(push=push, fence=fence, engine=engine, in_flight=0))
                case w.ExchangeAck(response_id=name, error=error) if name in self._acks:
                    if not self._acks[name].done():
                        self._acks[name].set_result(error)
                case Recalled(number=number) as told if number in self._recalls:
                    if not self._recalls[number].done():
                        self._recalls[number].set_result(told)
                case w.Exit():
                    return 0

    async def _fall(self, engine: str) -> None:
        """When it is asked to hold: dead before it does, dead before anybody hears, or busy for longer than that is waited for."""
        match self.world.rng.choice(("before", "after", "late", "late")):
            case "before":
                self.process.die()
            case "after":
                self._held.add(engine)
                self.process.die()
            case "late":
                await asyncio.sleep(self.world.rng.uniform(0.0, 15.0))

    async def respond_in(self, run: str, rollout: str, again: bool) -> str:
        """Serve one request of a rollout, the same each time; "" when the client has no reply. A reply may be lost after the ledger has it."""
        self._asked += 1
        place, request = (self.process.spawn << 40) + self._asked, f"request of {rollout}"
        name = await self._recall(run, rollout, request, place) if again else ""
        if name is None:
            return ""
        known = bool(name)
        name = name or self.world.number("response")
        there = known or await self.respond(run, name, rollout=rollout, request=request, place=place)
        if self.process.ended:
            return ""
        whole = bool(there) and not self.world.unlucky("lost")
        self.tell(Delivery(run=run, response_id=name, whole=whole))
        return name if whole else ""

    async def _recall(self, run: str, rollout: str, request: str, place: int) -> str | None:
        """The stored reply to a repeated request, "" when there is none; None when the daemon does not say."""
        number = self._asked
        answer = self._recalls[number] = asyncio.get_running_loop().create_future()
        self.tell(Recall(number=number, run=run, rollout=rollout, request=request, place=place))
        try:
            told = await asyncio.wait_for(answer, LEDGER_S)
        except TimeoutError:
            return None
        finally:
            del self._recalls[number]
        return None if told.error or self.process.ended else told.response_id

    async def respond(self, run: str, name: str = "", **rollout: Any) -> str:
        """Serve one request: id of a response that is in the ledger, "" when it failed."""
        free = [engine for engine in self._route.engines if engine.engine not in self._held and engine.served]
        newest = max((engine.served[-1].epoch for engine in free), default=0)
        best = [engine for engine in free if engine.served[-1].epoch == newest]
        place = self.world.rng.choice(best) if best else None
        engine = self.world.engines.get(place.socket) if place else None
        if place is None or engine is None:
            return ""
        served = place.served[-1]
        weights = await engine.generate(place.mode, served.name)
        if not weights or self.process.ended:
            return ""
        self.world.history.generated(served.name, weights)
        name = name or self.world.number("response")
        message = w.Exchange(
            response_id=name, run=run, model=served.name, split="train", sampling=Sampling(), choices=1, prompt_tokens=2,
            completion_tokens=2, seconds=0.1, **rollout,
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
