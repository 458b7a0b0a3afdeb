"""Nothing outlives the daemon by two seconds, and the next boot ends what did, but never a process whose owner lives.

Each worker but the gateway has a child in a session of its own whose parent is dead, as a program of a user may make one.
What lives is read from /proc.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from artd.supervise import procfs
from artd.supervise.spawn import GUARDIAN
from artd_schema.paths import process_ticks
from tests.crash.shim import Failure, Shim
from tests.daemon.rig import Rig, fill
from tests.daemon.rig import rig as another_rig
from tests.daemon.test_fence import REMOTE
from tests.process.helpers import process, tags

pytestmark = pytest.mark.asyncio
STRAY = "(setsid sleep 600 &)\n"
WORKERS = ("gateway", "trainer", "engine")


def with_strays(rig: Rig) -> Rig:
    wrapper = rig.root / "python"
    shebang, rest = wrapper.read_text().split("\n", 1)
    wrapper.write_text(f"{shebang}\n{STRAY}{rest}")
    return rig


@pytest.fixture(name="rig")
def whose_workers_have_strays(rig: Rig) -> Rig:
    return with_strays(rig)


def guardian(rig: Rig, name: str) -> int:
    ((pid,),) = rig.rows("SELECT pid FROM process WHERE kind = ?", name)
    return int(pid)


def strays(rig: Rig) -> list[procfs.Stat]:
    pids = [int(line.split(":")[0]) for line in rig.living() if "sleep 600" in line]
    return [stat for pid in pids if (stat := procfs.read_stat(pid)) is not None]


def tree(rig: Rig) -> set[tuple[int, int | None]]:
    """Every process of this rig, by pid and start."""
    return {(pid, process_ticks(pid)) for pid in (int(line.split(":")[0]) for line in rig.living())}


async def up(rig: Rig) -> None:
    """Every worker is there, with what it made."""
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
    rig.until(lambda: len(strays(rig)) == 2, "two strays")


async def test_nothing_outlives_the_daemon(rig: Rig):
    rig.points.mkdir()
    await up(rig)
    os.kill(rig.worker_pid("engine"), signal.SIGSTOP)
    os.kill(guardian(rig, "trainer"), signal.SIGSTOP)
    os.kill(rig.worker_pid("gateway"), signal.SIGSTOP)
    rig.kill()

    await up(rig)
    together = [rig.worker_pid("engine"), guardian(rig, "trainer")]
    os.kill(rig.process.pid, signal.SIGSTOP)  # it would notice their death; now the gateway's guardian has to
    for pid in together:
        os.kill(pid, signal.SIGKILL)
    rig.kill()

    rig.arm("pack.written", action="stop")
    await up(rig)
    async with rig.run() as (_, run):
        await fill(run, 1)
        packer = rig.until(lambda: rig.taken("pack.written"), "the packer")
        rig.until(lambda: procfs.read_stat(packer).state == "T", "the packer's stop")
        rig.kill()

    rig.arm("spawn.started")
    rig.start(wait=False)
    assert rig.died() == -signal.SIGKILL
    rig.assert_nothing_lives()


def waits(pid: int) -> str:
    """Where in the kernel the main thread of a process is."""
    return Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.slow  # tests/process/test_owner_death.py has the kill alone
async def test_a_trainer_that_holds_the_gil_for_ten_seconds_dies_with_its_daemon_and_outlives_its_silence(rig: Rig):
    rig.script.write(gil__1=[])
    await up(rig)
    async with rig.run() as (_, run):
        await fill(run, 1)
        for fence in (1, 2):
            rig.reached(f"train:1 {fence}")
            trainer = rig.worker_pid("trainer")
            rig.until(lambda trainer=trainer: waits(trainer) == "hrtimer_nanosleep", "the native call")
            if fence == 1:
                rig.restart()
        began = time.monotonic()
        assert (await run.wait(1, timeout=60)).step == 1
        assert time.monotonic() - began > 8 and rig.worker_pid("trainer") == trainer


@pytest.mark.parametrize("whose", ["the guardian's", "the worker's"])
async def test_killed_between_fork_and_exec(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str):
    part = str(GUARDIAN) if whose == "the guardian's" else f"^{sys.executable}|-m|artd_workers.gateway"
    shim = Shim(tmp_path, rig.root)
    with monkeypatch.context() as patch:
        for name, value in shim.environment(Failure("exec", 1, 0, part=part), record=False).items():
            patch.setenv(name, value)
        rig.start(wait=False)
    rig.until(lambda: shim.failed, "an exec")
    (forked,) = rig.until(lambda: [stat for stat in procfs.descendants([rig.process.pid], procfs.all_stats())
                                   if stat.state == "T"], "a process that is stopped before its exec")  # fmt: skip
    assert (str(GUARDIAN) in Path(f"/proc/{forked.pid}/cmdline").read_text()) == (whose == "the worker's")
    rig.process.kill()
    rig.process.wait()
    if whose == "the guardian's":
        procfs.signal_exact(forked.pid, forked.ticks, signal.SIGCONT)  # nobody but this test ever stops it there
    rig.assert_nothing_lives()
    assert (rig.data / "logs" / "gateway.log").read_text() == ""


async def left_by_a_boot(rig: Rig) -> list[procfs.Stat]:
    """Kill the daemon with every guardian: what is in a session of its own lives on."""
    await up(rig)
    guardians = [guardian(rig, name) for name in WORKERS]
    os.kill(rig.process.pid, signal.SIGSTOP)  # it would notice their death, and do their work
    for pid in guardians:
        os.kill(pid, signal.SIGKILL)
    rig.process.kill()
    rig.process.wait()
    left = strays(rig)
    rig.until(lambda: len(rig.living()) == 2, "the death of all others", 2.0)
    assert len(left) == 2
    return left


def lives(stat: procfs.Stat) -> bool:
    return procfs.alive(procfs.Identity(procfs.boot_id(), stat.pid, stat.ticks))


async def test_nothing_is_started_beside_what_is_left_until_a_boot_ends_it_and_nobody_elses(rig: Rig):
    left = await left_by_a_boot(rig)
    told = {f"broken(pid {stat.pid}, state S)" for stat in left}
    rig.start(under=REMOTE)  # they do not die
    broken = "SELECT count(*) FROM process WHERE state = 'broken'"
    rig.until(lambda: rig.one(broken) == len(left), "two broken workers")
    command = [sys.executable, "-m", "artd.cli.ctl", "status", "--data-dir", str(rig.data)]
    status = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert all(text in status for text in told), status
    assert len([mark for mark in rig.script.marks() if mark.startswith("started")]) == 1
    rig.process.kill()
    rig.process.wait()
    assert all(map(lives, left))
    with process(tags("f" * 32, owner="1:1")) as stranger:
        rig.start()
        assert not any(map(lives, left))
        assert lives(stranger)
        rig.reached("started 2")


@pytest.mark.slow  # tests/process/test_reap.py has the same without daemons
async def test_a_copy_never_touches_the_originals_workers_nor_the_original_those_of_the_copy(rig: Rig):
    await up(rig)
    original = tree(rig)
    with another_rig() as copy:
        with_strays(copy)
        copy.model = rig.model
        shutil.copytree(rig.data, copy.data)
        await up(copy)
        assert tree(rig) == original
        copied = tree(copy)
        assert len(copied) == len(original)
        rig.restart()
        assert tree(copy) == copied
        await fill_and_wait(copy)
        again = tree(rig)
        copy.kill()
        assert tree(rig) >= again


async def fill_and_wait(rig: Rig) -> None:
    async with rig.run() as (_, run):
        await fill(run, 1)
        assert (await run.wait(1, timeout=60)).step == 1
