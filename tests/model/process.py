"""A process of the simulation, and what every worker in one does: Hello, heartbeats, the inbox.

Owner of: who lives. Invariants: whatever goes wrong is drawn from the world's chance; a process that was killed does nothing
more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from artd.supervise import procfs
from artd_schema import PROTOCOL
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import parse_worker

if TYPE_CHECKING:
    from .world import World

HELLO_S = 20.0
BEAT_S = 7.0
HANG_S = 90.0


class Process:
    """What the supervisor takes for a guardian with its subtree. workers: what runs in it, by its kind; reported: (job, fence) of
    jobs that it reported."""

    def __init__(
        self, world: World, env: Mapping[str, str], woken: Callable[[], None], workers: Mapping[str, type[Worker]]
    ) -> None:
        self.name, self.spawn, self.instance = env["ARTD_WORKER"], int(env["ARTD_SPAWN"]), env["ARTD_INSTANCE"]
        self.who = procfs.Identity("simulated", 1000 + self.spawn, 1)
        self.session = self.who.pid
        self.code: int | None = None
        self.reported: set[tuple[int, int]] = set()
        self._world = world
        self._life = world.life
        self._woken = woken
        self._tasks: list[asyncio.Task[Any]] = []
        self.worker = workers[parse_worker(self.name).kind](world, self)
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

    def trace(self) -> None:
        """Nobody reads a simulated log."""

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
                self.tell(w.Beat(job=self.job, fence=self.fence, progress=self.progress))
            await asyncio.sleep(BEAT_S)

    job = fence = progress = 0

    async def hang(self) -> None:
        """Nothing at all for a while, as a stopped process."""
        self.hung = True
        await asyncio.sleep(HANG_S)
        self.hung = False

    async def serve(self, welcome: w.Welcome) -> int:
        raise NotImplementedError
