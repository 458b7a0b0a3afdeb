"""Supervises one worker in a single task: starts its process, watches it, and starts it again by the policy.

Owns the worker's state, its living process and its back-off. There is at most one process, and the next one starts only
after the last one is proven dead, whichever boot made it (until then the worker is broken; a tripped breaker also waits
for the operator). The spawn number is durable before the process exists. The listener learns (and stores) a state
before anything follows from it. A listener never calls back into the worker that reports to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import time
from collections.abc import Callable

import anyio
import anyio.to_thread

from artd.health.awake import Awake

from . import postmortem, procfs
from .backoff import Backoff
from .reap import strike_again
from .spawn import Child, Undead, spawn
from .spec import Info, Launch, Listener, Spec
from .states import State, follow

ERROR_LINES = 10
TRACE_S = 1.0
"""How long a process may take to write its stacks before it is killed."""
START_LOOK_S = 5.0
"""The period of looks at a worker that starts, so that time in which the daemon was stopped does not count."""
LOOK_S = 2.0
"""The period in which a broken worker checks whether the process that does not die is gone."""


class Worker:
    """One worker. A task runs `run()`; the other methods give that task orders and news. `clock` returns monotonic seconds."""

    def __init__(
        self, spec: Spec, listener: Listener, backoff: Backoff, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.spec = spec
        self.state: State = "stopped"
        self.spawn = 0
        self.restarts = 0
        self.error = ""
        self._listener = listener
        self._backoff = backoff
        self._clock = clock
        self._child: Child | None = None
        self._launch: Launch | None = None
        self._leftovers = spec.leftovers
        self._tripped = False
        self._oom_kills = 0
        self._wanted = False
        self._retry = False
        self._closed = False
        self._retired = False
        self._grace: float | None = None
        self._reason = ""
        self._traced = False
        self._why = ""
        self._ordered = False
        self._delay = 0.0
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._waiters: list[asyncio.Future[None]] = []

    # ---- orders and news, from other tasks --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker. A broken one stays broken until `retry`."""
        self._wanted = True
        self._wake.set()

    def retry(self) -> None:
        """Start the worker now, regardless of back-off and breaker, and forget its deaths. The operator asks for this."""
        self._wanted = self._retry = True
        self._wake.set()

    def retire(self) -> None:
        """End the task of a stopped worker, for good."""
        self._retired = True
        self._wake.set()

    async def stop(self, grace_s: float, reason: str) -> None:
        """Stop the worker; return when its process is proven dead. Raises Undead."""
        self._wanted = False
        if self.state != "stopped":
            await self._order(grace_s, reason)

    async def kill(self, spawn: int | None, reason: str, traced: bool = False) -> None:
        """Kill the process (of that spawn number, if given); return when it is proven dead. Another follows if it is wanted.

        With `traced`, the process first writes its stacks (`Child.trace`). Raises Undead when it does not die.
        """
        if spawn in (None, self.spawn) and self._has_process():
            self._traced = traced and self._grace is None
            await self._order(0.0, reason)

    async def ready(self, spawn: int) -> bool:
        """Note that the process can take work. Returns False if the report comes from an older process, or too late."""
        async with self._lock:
            child = self._child
            late = child is None or child.exited or self._grace is not None
            if late or spawn != self.spawn or self.state not in ("starting", "ready"):
                return False
            if self.state != "ready":
                await self._tell("ready")
        self._wake.set()
        return True

    def _has_process(self) -> bool:
        return self.state in ("starting", "ready", "draining") or self._child is not None

    async def _order(self, grace_s: float, reason: str) -> None:
        if self._closed:
            raise RuntimeError(f"worker {self.spec.name!r} is no longer supervised")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(done)
        if self._grace is None:
            self._grace, self._reason = grace_s, reason
        else:
            self._grace = min(self._grace, grace_s)
        self._wake.set()
        await asyncio.shield(done)

    # ---- the task ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled or retired, then kill the subtree and prove its death. An exception of the listener ends it too."""
        act = {"stopped": self._rest, "broken": self._lie_broken, "backoff": self._hold_off, "starting": self._live}
        try:
            while not (self._retired and self.state == "stopped"):
                await act[self.state]()
        finally:
            self._closed = True
            with anyio.CancelScope(shield=True):
                if self._child is not None:
                    await self._child.kill()
            self._settle(RuntimeError(f"worker {self.spec.name!r} is no longer supervised"))

    async def _rest(self) -> None:
        self._settle()
        while not (self._wanted or self._retired):
            await self._sleep(None)
        if not self._retired:
            await self._set("starting")

    async def _hold_off(self) -> None:
        deadline = self._clock() + self._delay
        if self._wanted:
            self._settle()
        while self._wanted and not self._retry and (left := deadline - self._clock()) > 0:
            await self._sleep(left)
        if self._wanted:
            await self._start_again()
        else:
            await self._set("stopped")

    async def _lie_broken(self) -> None:
        while True:
            if self._child is not None:
                buried = await self._bury()
                self._retry = self._retry and buried
            if self._child is None:
                if not self._wanted:
                    return await self._set("stopped")
                if self._retry or not (self._tripped or self._haunted()):
                    return await self._start_again()
                self._settle()
            await self._sleep(LOOK_S if self._child is not None or self._leftovers else None)

    def _haunted(self) -> bool:
        """Send another SIGKILL to the processes of older boots. Returns whether one still lives."""
        self._leftovers = strike_again(self._leftovers)
        if self._leftovers:
            first = self._leftovers[0]
            self.error = str(Undead(self.spec.name, first.pid, first.state))
        return bool(self._leftovers)

    async def _start_again(self) -> None:
        if self._retry:
            self._backoff.reset()
        self._retry = self._tripped = False
        self.restarts += 1
        await self._set("starting")

    async def _live(self) -> None:
        self._retry = False
        if self._haunted():
            await self._set("backoff")
            await self._set("broken")
            return
        self.spawn = await self._listener.next_spawn(self.spec.name)
        started = self._clock()
        self._why, self._ordered = self._make()
        if self._child is not None:
            async with self._lock:
                await self._tell("starting")
            self._why, self._ordered = await self._watch(self._child)
            buried = await self._bury()
        else:
            buried = self._ordered or await self._record(None)
        delay = 0.0 if self._ordered else self._backoff.record_death(started, self._clock())
        self._delay = delay or 0.0
        if buried and self._ordered and self.state == "draining":
            await self._set("stopped")
        else:
            await self._set("backoff")
            self._tripped = delay is None and self._wanted
            if not buried or self._tripped:
                await self._set("broken")

    def _make(self) -> tuple[str, bool]:
        """Make the process. Returns ("", False), or why there is none and whether that was ordered."""
        if self._grace is not None or not self._wanted:
            return self._reason, True
        self._oom_kills = procfs.oom_kills()
        try:
            self._launch = self.spec.launch(self.spawn)
            self._launch.tmpdir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._child = spawn(
                self.spec.name,
                self._launch.argv,
                self._launch.env,
                self._launch.log,
                cwd=self._launch.tmpdir,
                fds=self._launch.fds,
                woken=self._wake.set,
            )
        except OSError as error:
            return f"worker {self.spec.name!r} could not be started: {error}", False
        return "", False

    async def _watch(self, child: Child) -> tuple[str, bool]:
        """Wait until the process has ended or must end. Returns (what the supervisor itself knows of the reason, whether it was
        ordered)."""
        awake = Awake(self._clock, 2 * START_LOOK_S)
        while not child.exited:
            if self._grace is not None:
                if self._grace > 0 or not self._wanted:
                    await self._set("draining")
                    await self._drain(child)
                elif self._traced:
                    await self._trace(child)
                return self._reason, True
            left = self.spec.start_timeout_s - awake.now() if self.state == "starting" else None
            if left is not None and left <= 0:
                return f"worker {self.spec.name!r} was not ready {self.spec.start_timeout_s:g} s after its start", False
            await self._sleep(None if left is None else min(left, START_LOOK_S))
        return "", False

    async def _drain(self, child: Child) -> None:
        child.terminate()
        await self._give(child, lambda: self._grace or 0.0)

    async def _trace(self, child: Child) -> None:
        child.trace()
        await self._give(child, lambda: TRACE_S)

    async def _give(self, child: Child, seconds: Callable[[], float]) -> None:
        """Wait for the end of the process, at most `seconds()`, which may become fewer meanwhile."""
        began = self._clock()
        while not child.exited and (left := began + seconds() - self._clock()) > 0:
            await self._sleep(left)

    async def _bury(self) -> bool:
        """Kill the rest of the subtree and prove its death. Returns False if it does not die; `error` says so then, and the waiting
        orders raise it."""
        assert self._child is not None and self._launch is not None
        try:
            code = await self._child.kill()
        except Undead as undead:
            self.error = str(undead)
            self._settle(undead)
            return False
        await self._record(code)
        self._child = None
        # It holds sockets and scratch files of a dead process; no spawn uses the folder again, so errors do not matter.
        remove = functools.partial(shutil.rmtree, self._launch.tmpdir, ignore_errors=True)
        await anyio.to_thread.run_sync(remove)
        return True

    async def _record(self, code: int | None) -> bool:
        tail = self._child.tail() if self._child is not None else ""
        status = postmortem.explain(code, tail, procfs.oom_kills() - self._oom_kills, self._why)
        last = tail.splitlines()[-ERROR_LINES:]
        self.error = "" if self._ordered else "\n".join([status.text, *last])
        await self._listener.on_exit(self.spec.name, self.spawn, status, self._ordered, tail)
        return True

    # ---- helpers ----------------------------------------------------------------------------------------------------

    async def _set(self, state: State) -> None:
        async with self._lock:
            await self._tell(follow(self.state, state))

    async def _tell(self, state: State) -> None:
        if state != self.state:
            self.state = follow(self.state, state)
        if state == "ready":
            self.error = ""
        await self._listener.on_state(self.spec.name, state, self.info())

    def info(self) -> Info:
        """Return the worker's row of table `process` as of now."""
        child, launch = self._child, self._launch
        who: procfs.Identity | None = child.who if child else None
        if who is None and self._leftovers:
            who = procfs.Identity(procfs.boot_id(), *self._leftovers[0].key)
        return Info(
            kind=self.spec.kind,
            spawn=self.spawn,
            restarts=self.restarts,
            boot_id=who.boot_id if who else "",
            pid=who.pid if who else None,
            ticks=who.ticks if who else None,
            session=child.session if child else None,
            error=self.error,
            log=str(launch.log) if launch else "",
        )

    async def _sleep(self, seconds: float | None) -> None:
        """Sleep until there is news, at most `seconds`. Earlier news end the sleep at once."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()

    def _settle(self, error: Exception | None = None) -> None:
        """Answer all waiting orders, because none is left to carry out."""
        waiters, self._waiters = self._waiters, []
        self._grace, self._reason, self._traced = None, "", False
        for done in waiters:
            if not done.done():
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
