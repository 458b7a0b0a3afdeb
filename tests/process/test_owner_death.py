"""Nothing outlives the daemon: whatever the tree looks like when the daemon is killed, it is gone within 2 s."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from artd.supervise import procfs
from artd.supervise.spawn import guard_command
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
    with helpers.spawner(instance, tmp_path / "log", program) as daemon:
        _up(daemon, instance, processes)
        if tree == "stopped":
            helpers.until(lambda: any(stat.state == "T" for stat in helpers.tagged(instance)))
        before = helpers.tagged(instance)
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)


def test_a_grandchild_of_another_session_without_its_tags(instance: str, tmp_path: Path) -> None:
    """Neither session nor environment tells whose it is: the guardian knows, as the subreaper of all that descends from it."""
    with helpers.spawner(instance, tmp_path / "log", helpers.BARE) as daemon:
        guardian, _ = _up(daemon, instance, 2)
        helpers.until(lambda: len(procfs.descendants([guardian], procfs.all_stats())) == 2)
        before = [*helpers.tagged(instance), *procfs.descendants([guardian], procfs.all_stats())]
        assert len({stat.session for stat in before}) == 2
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)


def test_killed_between_spawn_and_exec(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, tmp_path / "log", helpers.SETSID, at_once=True) as daemon:
        assert daemon.wait() == -signal.SIGKILL
        helpers.until(lambda: not helpers.tagged(instance), BOUND_S)


def test_a_guardian_whose_daemon_is_dead_starts_nothing(tmp_path: Path) -> None:
    """As when it was stopped before its first instruction, and somebody woke it long after."""
    reading, writing = os.pipe()
    os.close(writing)
    command = guard_command(reading, ["/bin/sh", "-c", ": > ran"])
    for _ in range(5):  # one that starts it, and kills it at once, is now and then quick enough
        ended = subprocess.run(command, cwd=tmp_path, pass_fds=(reading,), check=False)
        assert ended.returncode == 128 + signal.SIGKILL
        assert not (tmp_path / "ran").exists()
    os.close(reading)


def test_daemon_and_one_guardian_killed_together(instance: str, tmp_path: Path) -> None:
    """What the dead guardian would have ended is ended by another of the same daemon, and nothing else is."""
    owner = ":".join(map(str, procfs.identity()[1:]))
    with (
        helpers.process(helpers.tags(instance, owner=owner)) as elsewhere,
        helpers.process(helpers.tags(instance, boot=2, owner=owner)) as later,
        helpers.spawner(instance, tmp_path / "log", helpers.SETSID, helpers.SLEEP) as daemon,
    ):
        guardian, _ = _up(daemon, instance, 5 + 2)
        before = [stat for stat in helpers.tagged(instance) if stat.pid not in (elsewhere.pid, later.pid)]
        daemon.send_signal(signal.SIGSTOP)  # it would notice the guardian's death, and do its work
        os.kill(guardian, signal.SIGKILL)
        daemon.kill()
        helpers.dead(before, BOUND_S)
        assert {stat.pid for stat in helpers.tagged(instance)} == {elsewhere.pid, later.pid}


def test_daemon_and_worker_killed_together(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, tmp_path / "log", helpers.SETSID) as daemon:
        guardian, _ = _up(daemon, instance, 3)
        (worker,) = [stat for stat in helpers.tagged(instance) if stat.ppid == guardian and stat.session == guardian]
        before = helpers.tagged(instance)
        daemon.send_signal(signal.SIGSTOP)
        os.kill(worker.pid, signal.SIGKILL)
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)


def test_stopped_guardian_wakes_when_the_daemon_dies(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, tmp_path / "log", helpers.SETSID) as daemon:
        guardian, ticks = _up(daemon, instance, 3)
        procfs.signal_exact(guardian, ticks, signal.SIGSTOP)
        helpers.until(lambda: procfs.read_stat(guardian).state == "T")
        before = helpers.tagged(instance)
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)


def test_terminal_interrupt_does_not_reach_guardian_or_worker(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, tmp_path / "log", helpers.SLEEP) as daemon:
        guardian, _ = _up(daemon, instance, 2)
        os.kill(guardian, signal.SIGINT)
        os.kill(guardian, signal.SIGHUP)
        assert {stat.session for stat in helpers.tagged(instance)} == {guardian} != {os.getsid(0)}
        with pytest.raises(AssertionError):
            helpers.until(lambda: len(helpers.tagged(instance)) < 2, 0.3)
        before = helpers.tagged(instance)
        daemon.kill()
        helpers.gone(instance, before, BOUND_S)
