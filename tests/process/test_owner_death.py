"""Nothing outlives the daemon: whatever the tree looks like when the daemon is killed, it is gone within 2 s."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from artd.supervise import procfs
from tests.process import helpers

BOUND_S = 2.0
TREES = {
    "plain": (helpers.SLEEP, 2),
    "setsid grandchild": (helpers.SETSID, 3),
    "stopped": (helpers.STOPPED, 2),
    "holds the GIL": (helpers.GIL, 2),
    "ignores signals": (helpers.DEAF, 2),
}


def _up(process: object, instance: str, processes: int) -> tuple[int, int]:
    guardian, ticks = map(int, process.stdout.readline().split())  # type: ignore[attr-defined]
    helpers.until(lambda: len(helpers.tagged(instance)) == processes)
    return guardian, ticks


@pytest.mark.parametrize("tree", TREES)
def test_kill_9_of_the_daemon(tree: str, instance: str, tmp_path: Path) -> None:
    program, processes = TREES[tree]
    with helpers.spawner(instance, program, tmp_path / "log") as daemon:
        _up(daemon, instance, processes)
        if tree == "stopped":
            helpers.until(lambda: any(stat.state == "T" for stat in helpers.tagged(instance)))
        before = helpers.tagged(instance)
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)


def test_killed_between_spawn_and_exec(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, helpers.SETSID, tmp_path / "log", at_once=True) as daemon:
        assert daemon.wait() == -signal.SIGKILL
        helpers.until(lambda: not helpers.tagged(instance), BOUND_S)


def test_daemon_and_worker_killed_together(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, helpers.SETSID, tmp_path / "log") as daemon:
        guardian, _ = _up(daemon, instance, 3)
        (worker,) = [stat for stat in helpers.tagged(instance) if stat.ppid == guardian and stat.session == guardian]
        before = helpers.tagged(instance)
        daemon.kill()
        os.kill(worker.pid, signal.SIGKILL)
        helpers.gone(instance, before, BOUND_S)


def test_stopped_guardian_wakes_when_the_daemon_dies(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, helpers.SETSID, tmp_path / "log") as daemon:
        guardian, ticks = _up(daemon, instance, 3)
        procfs.signal_exact(guardian, ticks, signal.SIGSTOP)
        helpers.until(lambda: procfs.read_stat(guardian).state == "T")  # type: ignore[union-attr]
        before = helpers.tagged(instance)
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)


def test_terminal_interrupt_does_not_reach_guardian_or_worker(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, helpers.SLEEP, tmp_path / "log") as daemon:
        guardian, _ = _up(daemon, instance, 2)
        os.kill(guardian, signal.SIGINT)
        os.kill(guardian, signal.SIGHUP)
        assert {stat.session for stat in helpers.tagged(instance)} == {guardian} != {os.getsid(0)}
        with pytest.raises(AssertionError):
            helpers.until(lambda: len(helpers.tagged(instance)) < 2, 0.3)
        before = helpers.tagged(instance)
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)
