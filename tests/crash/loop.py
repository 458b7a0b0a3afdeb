"""One run that goes on and on while its processes are killed at crash points.

It owns the daemon of a rig, one client and its journal. A point is armed before anything that reaches it begins. Before every
recovery the folder is intact and no process lives. After every point the run comes to rest at a step that is served.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest import mock

import httpx

from artd_client import ArtdError, Client, connection, turn
from artd_client.run import Run
from artd_schema.codec import digest
from artd_schema.crashpoint import POINTS
from artd_schema.wire import client_api as api
from tests.daemon.rig import ROOT, SPEC, VOCAB, Rig
from tests.soak import evidence, history
from tests.soak.journal import Acked, Journal, Replied, read
from tests.soak.load import Load

BOOT = frozenset({
    "schema.created", "spawn.started", "reap.done", "recover.adopted", "recover.interrupted", "recover.removed",
    "retain.retired",
})  # fmt: skip
"""Points that a start of the daemon reaches."""
LATE = frozenset({"submit.inserted", "writer.commit", "result.verified", "result.published"})
"""Points before a promise may be given: whoever gives it too early is to be heard."""
ASK_S = 0.2
STEPS = 4
"""In which every point is reached: a result that is adopted at a boot is not committed in the ordinary way, say."""
FLOOD = 90  # bodies of 60 KB in rows: more than a WAL may hold before it is folded in
TAKE_S = 150.0  # generous: a busy machine


class Loop:
    """rig: its daemon is started by the first point that is survived. Use `running`."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._journal = Journal(rig.root / "test.journal")
        self._others = rig.root / "other.journal"
        self._load = Load("t", self._journal, VOCAB, lambda tokens: evidence.verified(rig.script, tokens))
        self._collector = evidence.Collector(rig.data, "r")
        self._step = 0
        self._floods = 0

    # ---- killing ------------------------------------------------------------------------------------------------------

    async def survive(self, points: tuple[str, ...], again: str = "") -> None:
        """Have whoever reaches each of these points killed there, as steps are made; again: a point at which the daemon is
        killed as well when it recovers."""
        self.rig.arm(*points)
        self.rig.arm(*LATE.intersection(points), action="late")
        await self._prepare(points, again)
        drive, asking = asyncio.create_task(self._drive(points)), asyncio.create_task(self._ask_on())
        try:
            async with asyncio.timeout(TAKE_S):
                while (left := self._left(points)) or not drive.done():
                    self._collector.look()
                    await self._raise(again)
                    assert not (left and drive.done()), f"{left}: never reached in {STEPS} steps"
                    if asking.done():
                        await asking  # what it was answered is not what a client may be answered
                    await asyncio.sleep(0.01)
                await drive
        except TimeoutError:
            raise AssertionError(f"{points}: not taken {self._left(points)}, {self.rig.log()}") from None
        finally:
            drive.cancel()
            asking.cancel()
        for path in self.rig.points.glob("*"):
            path.unlink()
        self._collector.look()

    def _left(self, points: tuple[str, ...]) -> list[str]:
        """Points that nobody has died at yet."""
        return [point for point in points if not self.rig.taken(point)]

    async def _prepare(self, points: tuple[str, ...], again: str) -> None:
        if "job.failed" in points:
            self.rig.script.write(**{f"interrupt:{self._step + 1}": [1], "http": 1, "sign": 1})
        if self.rig.process is None:
            await asyncio.to_thread(self.rig.start, False)
        elif BOOT.intersection(points) or (again and not any(POINTS[point] == "daemon" for point in points)):
            await asyncio.to_thread(self.rig.kill)
            await self._raise(again)

    @property
    def _dead(self) -> bool:
        return self.rig.process is not None and self.rig.process.poll() is not None

    async def _raise(self, again: str) -> None:
        """Start the daemon again when it is dead; before that, look at what it left."""
        if not self._dead:
            return
        assert self.rig.died() == -signal.SIGKILL, self.rig.log()
        await asyncio.to_thread(self.rig.assert_nothing_lives)
        self._assert_promises()
        if again and not self.rig.taken(again):
            self.rig.arm(again)
        await asyncio.to_thread(self.rig.start, False)

    def _assert_promises(self) -> None:
        """Whatever a trainer or a client was told is true of the rows, before anything is recovered."""
        rows = {sha for (sha,) in self.rig.rows("SELECT sha FROM checkpoint")}
        told = evidence.notes(self.rig.script).get("told", frozenset())
        assert told <= rows, f"told before it was committed: {told - rows}"
        keys = {key for (key,) in self.rig.rows("SELECT key FROM trajectory")}
        acked = {line.key for line in read(self._journal.path) if isinstance(line, Acked)}
        assert acked <= keys, f"acknowledged before it was committed: {acked - keys}"

    async def told_early(self) -> None:
        """Start, and die in the COMMIT of the first result, late enough that whatever was sent before it has arrived."""
        self.rig.arm("result.published", action="stop")
        await asyncio.to_thread(self.rig.start, False)
        drive = asyncio.create_task(self._drive(("result.published",)))
        try:
            await asyncio.to_thread(self.rig.until, lambda: self.rig.taken("result.published"), "a result", TAKE_S)
            self.rig.arm("writer.commit", action="late")
            os.kill(self.rig.taken("result.published"), signal.SIGCONT)
            await asyncio.to_thread(self.rig.died)
            await self._raise("")
            await drive
        finally:
            drive.cancel()

    async def served_early(self) -> None:
        """Nobody is answered between the resume of an engine with new weights and its Live."""
        step = self._step + 1
        self.rig.script.write(**{f"hold:verify:{step}": [], "http": 1, "sign": 1})
        run = await self._run()
        async with httpx.AsyncClient(timeout=10.0) as web:
            await self._load.group(run, web)
            held = lambda: any(mark.startswith(f"verify:{step} ") for mark in self.rig.script.marks())  # noqa: E731
            await asyncio.to_thread(self.rig.until, held, "an engine that verifies", TAKE_S)
            asking = asyncio.create_task(self._load.ask(run, web))
            await asyncio.wait([asking], timeout=0.5)
            assert not asking.done(), "answered by weights that nobody has verified"
            self.rig.script.write(http=1, sign=1)
            await asking
        await self._made(run)

    # ---- what is done meanwhile -----------------------------------------------------------------------------------------

    async def _drive(self, points: tuple[str, ...]) -> None:
        run = await self._run()
        if "wal.checkpoint" in points:
            await self._flood(run)
        if "gc.trashed" in points:
            await self._collect_garbage(points)
        if "stop.drained" in points:
            await asyncio.to_thread(self.rig.until, lambda: self.rig.state() == "ready", "ready", TAKE_S)
            self.rig.terminate()
            await asyncio.to_thread(self.rig.died)
        if "client.sent" in points:
            await asyncio.to_thread(self._other_client)
            await self._made(run)
        for _ in range(STEPS):
            if not (left := self._left(points)):
                return
            if "wal.checkpoint" in left:  # a daemon that died in the flood found a WAL that was folded in part
                await self._flood(run)
            async with httpx.AsyncClient(timeout=10.0) as web:
                await self._load.group(run, web)
            await self._made(run)

    async def _ask_on(self) -> None:
        """Replies all the time, whatever dies."""
        run = await self._run()
        async with httpx.AsyncClient(timeout=10.0) as web:
            while True:
                await self._load.ask(run, web)
                await asyncio.sleep(ASK_S)

    async def _made(self, run: Run) -> None:
        self._step += 1
        await run.wait(self._step, timeout=TAKE_S)

    async def _run(self) -> Run:
        spec = SPEC | {"group_size": 3, "row_length": 128, "keep_checkpoints": 1}
        while True:
            try:
                async with self._opening:
                    if self._client is None:
                        self._client = await Client(self.rig.data, timeout=30.0).__aenter__()
                run = await self._client.run("r", model=self.rig.model, **spec)
                await run.wait(0, timeout=30)
                return run
            except ArtdError:  # died with the answer to a request that is not repeated
                await asyncio.sleep(0.05)

    def _other_client(self) -> None:
        """A client in a process of its own that submits a group; killed, it is started again."""
        command = [sys.executable, "-m", "tests.soak.client", str(self.rig.root), "--name", "other", "--groups", "1"]
        env = self.rig.environment()
        assert subprocess.run(command, env=env, cwd=ROOT, check=False).returncode == -signal.SIGKILL
        subprocess.run(command, env=env, cwd=ROOT, check=True)

    async def _collect_garbage(self, points: tuple[str, ...]) -> None:
        """A file that no row knows goes to the trash in one pass and for good in the next."""
        loose = self.rig.data / "blobs" / digest(b"loose")[:2] / digest(b"loose")
        loose.parent.mkdir(exist_ok=True)
        loose.write_bytes(b"loose")
        os.utime(loose, (1.0, 1.0))  # of an older boot
        assert self._client is not None
        while {"gc.trashed", "gc.unlinked"}.intersection(self._left(points)):
            await self._client._open.ask(api.Collect(), api.Collected)
        assert not loose.exists()

    async def _flood(self, run: Run) -> None:
        self._floods += 1
        await asyncio.gather(*(
            run.submit(f"flood-{self._floods}-{n}", 1.0, turns=[turn([1], [2], [-1.0], raw=bytes(60_000))], split="eval",
                       key=f"f{self._floods}-{n}")
            for n in range(FLOOD)
        ))  # fmt: skip

    # ---- the end --------------------------------------------------------------------------------------------------------

    async def judge(self) -> None:
        """Everything that must hold, from inside the database and from outside of it."""
        found = history.judge(self._collector.evidence([self._journal.path, self._others], self.rig.script))
        assert not found, found
        assert any(isinstance(line, Replied) for line in read(self._journal.path)), "nobody was answered"
        self.rig.check(3 * self._step + FLOOD * self._floods)
        assert self.rig.one("SELECT step FROM run") == self._step

    async def close(self) -> None:
        self._journal.close()
        if self._client is not None:
            await self._client.close()


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Loop]:
    """A loop that is judged at its end."""
    rig.script.write(http=1, sign=1)
    loop = Loop(rig)
    with mock.patch.object(connection, "BACKOFF_S", (0.02, 0.1)):  # thirty restarts are waited for
        try:
            yield loop
            await loop.judge()
        finally:
            await loop.close()
