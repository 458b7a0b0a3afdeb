"""One child: status, stop, kill, proof of death, descriptors, and what it inherits."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from artd.supervise import procfs
from artd.supervise.spawn import Undead, spawn
from tests.awake import SOON_S, until
from tests.process import helpers

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os; os.abort()", 134),
    ],
)
async def test_exit_status_is_passed_on(program: str, code: int, instance: str, tmp_path: Path) -> None:
    child = helpers.start(instance, program, tmp_path / "log")
    assert await helpers.ended(child) == code
    assert await child.kill() == code, "it may be asked again"


async def test_a_command_that_is_not_there(instance: str, tmp_path: Path) -> None:
    child = spawn("engine", ["/nowhere/python", "-c", ""], helpers.tags(instance), tmp_path / "log")
    assert await helpers.ended(child) == 127
    assert "cannot execute '/nowhere/python': No such file or directory" in child.tail()


async def test_what_the_main_child_leaves_is_killed(instance: str, tmp_path: Path) -> None:
    program = helpers.SETSID.rpartition("\n")[0] + "\ntime.sleep(0.1); os._exit(3)"
    child = helpers.start(instance, program, tmp_path / "log")
    assert await helpers.ended(child) == 3
    assert not helpers.tagged(instance)


async def test_stop_lets_it_end_in_order(instance: str, tmp_path: Path) -> None:
    program = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('up', flush=True); time.sleep(600)"
    )
    child = helpers.start(instance, program, tmp_path / "log")
    await until(lambda: "up" in child.tail())
    child.terminate()
    assert await helpers.ended(child) == 5


async def test_stop_of_one_that_ignores_sigterm(instance: str, tmp_path: Path) -> None:
    child = helpers.start(instance, helpers.DEAF, tmp_path / "log")
    await until(lambda: "deaf" in child.tail())
    child.terminate()
    await asyncio.sleep(0.3)
    assert not child.exited
    assert await asyncio.wait_for(child.kill(), SOON_S) == 137
    assert not helpers.session_members(child.session)


async def test_a_second_sigterm_to_the_guardian_kills(instance: str, tmp_path: Path) -> None:
    child = helpers.start(instance, helpers.DEAF, tmp_path / "log")
    await until(lambda: "deaf" in child.tail())
    child.terminate()
    await asyncio.sleep(0.1)
    assert not child.exited
    child.terminate()
    assert await helpers.ended(child) == 137


@pytest.mark.parametrize("program", [helpers.STOPPED, helpers.GIL, helpers.SETSID])
async def test_kill_proves_death(program: str, instance: str, tmp_path: Path) -> None:
    child = helpers.start(instance, program, tmp_path / "log")
    processes = 3 if program == helpers.SETSID else 2
    await until(lambda: len(helpers.tagged(instance)) == processes)
    assert await child.kill() == 137
    assert not helpers.tagged(instance)
    assert procfs.read_stat(child.pid) is None, "the guardian is reaped"


async def test_kill_of_one_whose_first_thread_has_ended(instance: str, tmp_path: Path) -> None:
    child = helpers.start(instance, helpers.LEADERLESS, tmp_path / "log")
    await until(lambda: any(stat.state == "Z" for stat in procfs.descendants([child.pid], procfs.all_stats())))
    assert len(helpers.tagged(instance)) == 2
    assert await child.kill() == 137
    assert not helpers.tagged(instance)


async def test_guardian_killed_leaves_nothing(instance: str, tmp_path: Path) -> None:
    child = helpers.start(instance, helpers.SETSID, tmp_path / "log")
    await until(lambda: len(helpers.tagged(instance)) == 3)
    os.kill(child.pid, signal.SIGKILL)
    assert await helpers.ended(child) == -signal.SIGKILL
    assert not helpers.tagged(instance), "the setsid grandchild was found by its tag"


async def test_stopped_guardian_is_worked_around(instance: str, tmp_path: Path) -> None:
    child = helpers.start(instance, helpers.SETSID, tmp_path / "log")
    await until(lambda: len(helpers.tagged(instance)) == 3)
    child._signal = lambda number: signal.pidfd_send_signal(child._pidfd, number) if number != signal.SIGCONT else None
    os.kill(child.pid, signal.SIGSTOP)
    assert await child.kill(6.0) == -signal.SIGKILL
    assert not helpers.tagged(instance)


async def test_undead_names_pid_and_state(instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = helpers.start(instance, "raise SystemExit(0)", tmp_path / "log")
    await until(lambda: child.exited)
    stuck = procfs.Stat(4242, 1, child.session, "D", 1)
    with monkeypatch.context() as patch:
        patch.setattr(procfs, "all_stats", lambda: iter([stuck]))
        with pytest.raises(Undead, match=r"pid 4242, state D"):
            await child.kill(0.5)
    assert await helpers.ended(child) == 0, "the proof can be asked for again"


async def test_tags_and_nothing_else_is_inherited(instance: str, tmp_path: Path) -> None:
    program = (
        "import os\n"
        "if os.fork(): os.wait()\n"
        "else:\n"
        "    fds = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2\n"
        "           and os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "    signals = [line.split()[1] for line in open('/proc/self/status') if line[:6] in ('SigBlk', 'SigIgn')]\n"
        "    print(os.environ['ARTD_INSTANCE'], os.environ['ARTD_SPAWN'], fds, signals, os.readlink('/proc/self/fd/0'))\n"
    )
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        child = helpers.start(instance, program, tmp_path / "log", spawn=9)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert await helpers.ended(child) == 0
    name, spawn, rest = child.tail().split(" ", 2)
    descriptors, blocked, ignored, stdin = re.fullmatch(r"(\[.*?\]) \['(\w+)', '(\w+)'\] (.*)", rest).groups()
    assert (name, spawn, descriptors, stdin) == (instance, "9", "[]", "/dev/null")
    assert int(blocked, 16) == 0
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25) in the printing program; 32 and 33 are the C library's own, which
    # no program can reset.
    assert int(ignored, 16) & ~(0b11 << 31) == 0x1001000


async def test_the_log_is_private_and_a_tail_is_of_this_spawn(instance: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer.log"
    for number, lines in ((1, 100), (2, 3)):
        child = helpers.start(instance, f"for n in range({lines}): print({number}, n)", log)
        await helpers.ended(child)
        assert child.tail().splitlines() == [f"{number} {n}" for n in range(lines)][-40:]
    assert log.read_text().startswith("1 0\n")
    assert log.stat().st_mode & 0o777 == 0o600


async def test_fifty_spawns_leak_no_descriptor(instance: str, tmp_path: Path) -> None:
    async def cycle() -> None:
        child = spawn("trainer", ["/bin/true"], helpers.tags(instance), tmp_path / "log")
        assert await helpers.ended(child) == 0

    await cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await asyncio.gather(*(cycle() for _ in range(5)))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_guardian_killed_session_is_searched(instance: str, tmp_path: Path) -> None:
    """A descendant that dropped its environment carries no tag; its session still tells."""
    program = "import os, time\nif os.fork() == 0: os.execve('/bin/sleep', ['sleep', '600'], {})\ntime.sleep(600)"
    child = helpers.start(instance, program, tmp_path / "log")

    def without_tags() -> list[procfs.Stat]:
        return [stat for stat in helpers.session_members(child.session) if procfs.environment(stat.pid) == {}]

    await until(lambda: len(helpers.session_members(child.session)) == 3 and len(without_tags()) == 1)
    (bare,) = without_tags()
    os.kill(child.pid, signal.SIGKILL)
    await helpers.ended(child)
    assert not procfs.alive(procfs.Identity(procfs.boot_id(), bare.pid, bare.ticks))
