"""Manages the workers of one daemon, by name.

Owns the set of workers; each worker's task owns the rest. Tasks run in the caller's task group, so a failing callback
ends the daemon. No process outlives the group. The supervisor refuses reports of an older spawn.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from anyio.abc import TaskGroup

from .backoff import Backoff, Policy
from .spec import Info, Listener, Spec
from .states import State
from .worker import Worker


class UnknownWorker(KeyError):
    """No worker has this name."""

    def __str__(self) -> str:
        return str(self.args[0])


class Supervisor:
    """Starts, watches, restarts and ends workers. `clock` returns monotonic seconds, `uniform` random numbers in [0, 1)."""

    def __init__(
        self,
        group: TaskGroup,
        listener: Listener,
        policy: Policy = Policy(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._group = group
        self._listener = listener
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        self._workers: dict[str, Worker] = {}

    def add(self, spec: Spec, start: bool = True) -> None:
        """Supervise a worker from now on, and start it unless `start` is False. Raises ValueError when the name is taken."""
        if spec.name in self._workers:
            raise ValueError(f"worker {spec.name!r} exists already")
        worker = Worker(spec, self._listener, Backoff(self._policy, self._uniform), self._clock)
        self._workers[spec.name] = worker
        self._group.start_soon(worker.run, name=f"worker {spec.name}")
        if start:
            worker.start()

    def drop(self, name: str) -> None:
        """Supervise a stopped worker no longer. Raises ValueError when it is not stopped."""
        worker = self._of(name)
        if worker.state != "stopped":
            raise ValueError(f"worker {name!r} is {worker.state}; stop it before you drop it")
        worker.retire()
        del self._workers[name]

    def start(self, name: str) -> None:
        """Start a stopped worker. A broken one needs `retry_broken`."""
        self._of(name).start()

    def retry_broken(self, name: str) -> None:
        """Start a worker now, regardless of breaker and back-off, and forget its deaths. A worker that lives starts again after its
        next death, however often it has died before."""
        self._of(name).retry()

    async def ready(self, name: str, spawn: int) -> bool:
        """Note that the process of that spawn can take work. Returns False if it is not the present one, or is being ended."""
        return await self._of(name).ready(spawn)

    async def kill(
        self, name: str, spawn: int | None = None, reason: str = "killed by artd", traced: bool = False
    ) -> None:
        """Kill the subtree of a worker; return when it is proven dead and `on_exit` (ordered) has returned. The worker starts again.

        With `spawn`, do nothing unless that one is the present process. With `traced`, first let its main process write the stack
        of every thread to its log (SIGUSR1). Raises Undead when it does not die.
        """
        await self._of(name).kill(spawn, reason, traced)

    async def stop(self, name: str, grace_s: float = 15.0, reason: str = "stopped by artd") -> None:
        """End a worker (SIGTERM, grace_s, SIGKILL) and keep it stopped; return when it is proven dead. Raises Undead.

        A second call with a shorter grace shortens the grace of the first.
        """
        await self._of(name).stop(grace_s, reason)

    async def stop_all(self, grace_s: float = 15.0, reason: str = "artd is stopping") -> None:
        """Stop all workers at once. Raises an ExceptionGroup of what the stops raised, after all of them ended."""
        stops = [worker.stop(grace_s, reason) for worker in self._workers.values()]
        results = await asyncio.gather(*stops, return_exceptions=True)
        failed = [result for result in results if isinstance(result, Exception)]
        if failed:
            raise ExceptionGroup("workers that could not be stopped", failed)

    def state(self, name: str) -> State:
        return self._of(name).state

    def info(self, name: str) -> Info:
        return self._of(name).info()

    def names(self) -> tuple[str, ...]:
        return tuple(self._workers)

    def _of(self, name: str) -> Worker:
        if name not in self._workers:
            raise UnknownWorker(f"no worker {name!r}; use one of: {', '.join(self._workers) or 'none'}")
        return self._workers[name]
