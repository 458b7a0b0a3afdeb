"""A data folder on a small file system of its own that really gets full: nothing acknowledged is lost, nothing flaps, and all
continues by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from artd_client import Busy, Client
from artd_client.run import Run
from tests.daemon.rig import ROOT, Rig, fill, turn

pytestmark = [pytest.mark.asyncio, pytest.mark.mounts]
MIB = 1 << 20
SIZE, LOW, RESERVE = 32, 4, 2
LIMITS = f"min_free_mib = {LOW}\nreserve_mib = {RESERVE}\n"


@pytest.fixture
def small(rig: Rig) -> Iterator[Rig]:
    """A rig whose data folder is a tmpfs of SIZE MiB."""
    rig.config.write_text(rig.config.read_text().replace("min_free_mib = 1\n", LIMITS))
    rig.data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}m", "tmpfs", str(rig.data)], check=True)
    try:
        yield rig
    finally:
        if rig.process is not None and rig.process.poll() is None:
            rig.kill()
        subprocess.run(["umount", "--lazy", str(rig.data)], check=True)


class Filler:
    """A file that takes the space."""

    def __init__(self, rig: Rig) -> None:
        self.path = rig.data / "filler"
        self.root = rig.data

    def leave(self, free: int) -> None:
        """Leave so many bytes free."""
        found = os.statvfs(self.root)
        has = self.path.stat().st_size if self.path.exists() else 0
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        target = has + found.f_bavail * found.f_frsize - free
        os.ftruncate(handle, min(has, target))
        os.posix_fallocate(handle, 0, target)
        os.close(handle)


def status(rig: Rig) -> dict[str, Any]:
    command = [sys.executable, "-m", "artd.cli.ctl", "status", "--json", "--data-dir", str(rig.data)]
    return dict(json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout))


def reserve(rig: Rig) -> bool:
    return (rig.data / "reserve").exists()


async def first_step(rig: Rig, run: Run) -> None:
    """Train a step, and see that there is a reserve."""
    await fill(run, 1)
    await run.wait(1)
    rig.until(lambda: reserve(rig), "the reserve")


async def test_a_full_disk_stops_admission_and_heals(small: Rig) -> None:
    small.start()
    filler = Filler(small)
    async with small.run() as (_, run):
        await first_step(small, run)
        assert status(small)["health"] == "ok"

        filler.leave(LOW * MIB // 2)  # below the low mark
        (problem,) = small.until(lambda: status(small)["problems"], "status to say so")
        assert "nearly full" in problem["what"] and "artctl gc" in problem["next"]
        async with Client(small.data, timeout=2.0) as hasty:
            with pytest.raises(Busy, match="free"):
                await (await hasty.run("r")).submit("late", 1.0, turns=[turn(90)], key="late")
        assert reserve(small)

        filler.leave(0)  # nothing is left, all of a sudden
        small.until(lambda: not reserve(small), "the reserve to be given up")
        assert small.process.poll() is None, small.log()

        filler.path.unlink()
        small.until(lambda: status(small)["health"] == "ok" and reserve(small), "health and the reserve")
        await fill(run, 2)
        await run.wait(2)
    assert small.stop() == 0
    small.check(4)


async def test_no_room_for_a_commit_is_an_answer_not_an_end(small: Rig) -> None:
    """Between two looks of the watermarks another program takes every byte."""
    small.start()
    filler = Filler(small)
    acknowledged = []
    async with small.run() as (_, run), Client(small.data, timeout=2.0) as client:
        await first_step(small, run)
        hasty = await client.run("r")
        filler.leave(256 << 10)
        for number in range(400):
            try:
                await hasty.submit("g", 1.0, turns=[turn(number)] * 30, key=f"k{number}", split="eval")
            except Busy:
                break
            acknowledged.append(f"k{number}")
            filler.leave(0)
        else:
            raise AssertionError("it was never busy")
        small.until(lambda: not reserve(small), "the reserve to be given up")
        assert small.process.poll() is None, small.log()
        filler.path.unlink()
        await fill(run, 2)
        await run.wait(2)
        assert int(small.one("SELECT value FROM meta WHERE key = 'disk_full'")) >= 1  # a COMMIT it was
        known = {row[0] for row in small.rows("SELECT key FROM trajectory")}
        assert set(acknowledged) <= known
    assert small.stop() == 0
    assert small.one("SELECT count(*) FROM job WHERE attempts > 0 OR deaths > 0") == 0


@pytest.mark.slow
async def test_a_daemon_on_a_full_disk_stops_in_order_and_starts_again(small: Rig) -> None:
    small.start()
    filler = Filler(small)
    async with small.run() as (_, run):
        await first_step(small, run)
    filler.leave(0)
    assert small.stop() == 0 and small.one("SELECT value FROM meta WHERE key = 'clean'") == "1"
    filler.leave(LOW * MIB // 2)
    small.start()
    assert status(small)["health"] == "degraded"
    filler.path.unlink()
    small.until(lambda: status(small)["health"] == "ok", "health")
    async with small.run() as (_, run):
        await fill(run, 2)
        await run.wait(2)
    assert small.stop() == 0
    small.check(4)


@pytest.mark.slow
async def test_a_read_only_disk_is_said_at_the_start(small: Rig) -> None:
    small.start()
    assert small.stop() == 0
    subprocess.run(["mount", "-o", "remount,bind,ro", str(small.data)], check=True)
    small.start(wait=False)
    assert small.died() == 1 and "Read-only file system" in small.log()
    subprocess.run(["mount", "-o", "remount,bind,rw", str(small.data)], check=True)
    small.start()
    assert small.stop() == 0


@pytest.mark.slow
async def test_workers_that_die_on_a_full_disk_come_back_when_there_is_space(small: Rig) -> None:
    small.start()
    filler = Filler(small)
    async with small.run() as (_, run):
        await first_step(small, run)
        filler.leave(0)
        small.until(lambda: not reserve(small), "the reserve to be given up")
        filler.leave(0)  # what it had left is gone as well
        for name in ("trainer", "engine", "gateway"):
            os.kill(small.worker_pid(name), signal.SIGKILL)
        small.until(lambda: "gateway (spawn 1) ended" in small.log(), "their ends")
        await asyncio.sleep(2.0)
        assert small.process.poll() is None, small.log()
        filler.path.unlink()
        small.until(lambda: status(small)["health"] == "ok", "health", 40.0)
        await fill(run, 2)
        await run.wait(2)
    assert small.stop() == 0
    small.check(4)
    assert small.one("SELECT count(*) FROM job WHERE attempts > 0 OR deaths > 0") == 0
