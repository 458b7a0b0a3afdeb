"""Records three boots of the real daemon with scripted workers, and what its clients were told; the last boot is a newer artd
that migrates the database.

An acknowledgement carries the number of operations at the moment when the client had it, so whatever happened later is not
needed for it. Marks of the fake workers are in the log itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest

from artd_client import Client, Conflict
from artd_schema import crashpoint
from artd_schema.data.trajectory import Turn
from tests.daemon.rig import ROOT, Rig, turn
from tests.fixtures.schema.next import released

from .powerloss import Disk
from .shim import Op, Record, Shim

NEWER = (sys.executable, "-m", "tests.fixtures.schema.next")
"""What a daemon of the next release is started by."""
RESERVE_MIB = 1
LARGE = b"x" * (80 << 10)
KEEP = 1


@dataclass(frozen=True)
class Told:
    """What somebody was told, by the operation at which he knew it. kind: run, trajectory, response, step, backup (name) to
    clients; trained, served (step, fence) and committed (sha, fence) to workers."""

    sequence: int
    kind: str
    what: Any
    number: int = 0


@dataclass
class Recording:
    """start: the rig's folder before the first operation; told: in order; newer: the last operation before the third boot."""

    start: Disk
    newer: int = 0
    records: list[Record] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)


def marks(records: list[Record]) -> Iterator[Told]:
    """What the fakes wrote down: `train:2 1` when they were given step 2 under fence 1, `push:2 3` when they were to serve it
    under fence 3, `told:SHA 1` when a result was said to be committed."""
    kinds = {"train": "trained", "push": "served", "told": "committed"}
    for record in records:
        if record.op is Op.WRITE and record.path.endswith(".marks"):
            for line in record.data.decode().splitlines():
                point, _, fence = line.partition(" ")
                kind, _, what = point.partition(":")
                if kind in kinds:
                    yield Told(record.sequence, kinds[kind], int(what) if what.isdigit() else what, int(fence))


def large_turn(text: str) -> Turn:
    """A turn that is too large for a row."""
    return msgspec.structs.replace(turn(7), raw=LARGE + text.encode())


class Loop:
    """The script. Each method drives a part and notes what was acknowledged. points, point: where crash points
    are armed, and which one is."""

    def __init__(self, made: Rig, shim: Shim, points: Path, point: str, told: list[Told]) -> None:
        self.rig = made
        self.shim = shim
        self.points = points
        self.point = point
        self._told = told

    def note(self, kind: str, what: Any, number: int = 0) -> None:
        self._told.append(Told(self.shim.sequence, kind, what, number))

    async def submit(self, run: Any, group: str, large: bool = False) -> None:
        """One group of two."""
        for number in range(2):
            body = large_turn(f"{group}{number}") if large else turn(len(self._told) % 200)
            key = f"{group}-{number}"
            answer = await run.submit(group, float(number), turns=[body], key=key)
            self.note("trajectory", key, answer.trajectory)

    async def leave_a_file(self, run: Any) -> None:
        """A file that no row will ever name, and that is put again in the second boot."""
        with pytest.raises(Conflict):
            await run.submit("s1", 1.0, turns=[large_turn("s40")], key="s1-0")

    @asynccontextmanager
    async def collecting(self, client: Client) -> AsyncIterator[None]:
        """What nothing refers to is collected all the time, beside every step of whatever else goes on."""

        async def collect() -> None:
            while True:
                await client.collect()

        task = asyncio.ensure_future(collect())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def step(self, run: Any, step: int) -> None:
        await run.wait(step, timeout=90)
        self.note("step", step)

    async def ask(self, run: Any) -> str:
        """A response of the gateway, which has it in its ledger."""
        async with httpx.AsyncClient(base_url=run.base_url, headers={"Authorization": f"Bearer {run.api_key}"}) as http:
            body = {"model": run.model, "messages": [{"role": "user", "content": "Capital?"}], "max_tokens": 8}
            answer = await http.post(f"{run.base_url}/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            name = str(answer.json()["id"])
            self.note("response", name)
            return name

    async def first_boot(self) -> None:
        """Steps 0 to 2: by value, in rows and in files, and by reference; killed at `point`, on the way from
        the staged result of step 3 to its service."""
        made = self.rig
        made.script.write(http=1, hold__staged__3=[])
        made.start()
        async with made.run(keep_checkpoints=KEEP) as (_, run):
            self.note("run", "r")
            await self.step(run, 0)
            await self.submit(run, "s1")
            await self.submit(run, "s2", large=True)
            await self.leave_a_file(run)
            await self.step(run, 1)
            answers = [await self.ask(run) for _ in range(3)]
            await self.step(run, 2)
            for number, name in enumerate(answers[:2]):
                key = f"s3-{number}"
                answer = await run.submit("s3", float(number), responses=[(name, 0)], key=key)
                self.note("trajectory", key, answer.trajectory)
            made.reached("staged:3 1")
            (self.points / self.point).write_text("kill")
            made.script.write(http=1)
            assert made.died() == -signal.SIGKILL
        made.assert_nothing_lives()

    async def second_boot(self) -> None:
        """Step 3 is adopted; old checkpoints go; a backup; step 4, with files collected beside it; killed."""
        made = self.rig
        made.script.write(http=1)
        made.start()
        async with made.run(keep_checkpoints=KEEP) as (client, run), self.collecting(client):
            await self.step(run, 3)
            self.backup("backup")
            await self.submit(run, "s4", large=True)
            await self.step(run, 4)
            await self.submit(run, "s5")
        made.kill()

    async def third_boot(self) -> None:
        """The log of the database is folded in, a copy is made, the database is migrated; step 5; an orderly end."""
        with released():
            self.rig.start(under=NEWER)
            async with self.rig.run(keep_checkpoints=KEEP) as (_, run):
                await self.step(run, 5)
            self.rig.stop()

    def backup(self, name: str) -> None:
        command = [
            sys.executable,
            "-m",
            "artd.cli.ctl",
            "backup",
            str(self.rig.root / name),
            "--data-dir",
            str(self.rig.data),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.note("backup", name)


def reserved(made: Rig) -> None:
    """Have the rig's daemons keep a reserve that is small enough to be in every image."""
    limits = "[limits]\n"
    made.config.write_text(made.config.read_text().replace(limits, f"{limits}reserve_mib = {RESERVE_MIB}\n"))


def record(made: Rig, folder: Path, point: str = "publish.renamed") -> Recording:
    """The whole loop. folder: for the log, outside of the rig's; point: where the first daemon dies, by default when the result
    has its name and no fsync made that durable."""
    reserved(made)
    found = Recording(Disk(made.root))
    shim, points = Shim(folder, made.root), folder / "points"
    points.mkdir()
    with mock.patch.dict(os.environ, shim.environment() | {crashpoint.VARIABLE: str(points)}):
        loop = Loop(made, shim, points, point, found.told)
        asyncio.run(loop.first_boot())
        asyncio.run(loop.second_boot())
        found.newer = shim.sequence
        asyncio.run(loop.third_boot())
    found.records = list(shim.records())
    found.told = sorted([*found.told, *marks(found.records)], key=lambda told: told.sequence)
    return found
