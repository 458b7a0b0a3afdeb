"""What `artctl status` makes of a heartbeat and of sockets, and how the heart beats."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd.cli import health
from artd.cli.daemon_probe import Daemon
from artd.datadir.layout import DataDir
from artd.health import heart, pulse
from artd.net.sockets import Sockets
from artd_schema.paths import CLIENT_SOCKET, DaemonFile
from tests.awake import until


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="artd-h") as name:
        yield Path(name)


def told(folder: Path, ticks: int = 0, pid: int = 0) -> Daemon:
    return Daemon("ready", DaemonFile(pid or os.getpid(), ticks, "", "1", "ready", f"ipc://{folder / CLIENT_SOCKET}"))


def beat(folder: Path, loop_s: float = 0.0, writer_s: float = 0.0) -> None:
    now = time.monotonic_ns()
    pulse.write(folder, now - int(loop_s * 1e9), now - int(writer_s * 1e9))


def said(folder: Path, found: Daemon) -> str:
    problem = health.find_problem(folder, found)
    return problem.what if problem else ""


@pytest.mark.parametrize(
    ("loop", "writer", "expected"),
    [(0, 0, ""), (4, 4, ""), (6, 6, "hangs: no sign of life for 6 s"), (0, 6, "nothing is written to the database for 6 s")],
)  # fmt: skip
def test_an_old_heartbeat_is_a_problem(folder: Path, loop: float, writer: float, expected: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / CLIENT_SOCKET))
        beat(folder, loop, writer)
        found = said(folder, told(folder))
    assert expected in found and bool(found) == bool(expected)


def test_a_heartbeat_that_is_older_than_the_daemon_is_the_last_ones(folder: Path) -> None:
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / CLIENT_SOCKET))
        beat(folder, 100, 100)
        assert said(folder, told(folder, ticks=now)) == ""
        assert "hangs" in said(folder, told(folder, ticks=now - 10 * os.sysconf("SC_CLK_TCK")))


def test_sockets_that_are_gone_are_a_problem_though_the_heart_beats(folder: Path) -> None:
    assert "sockets are gone" in said(folder, told(folder))
    beat(folder)
    assert "sockets are gone" in said(folder, told(folder))
    (folder / CLIENT_SOCKET).write_text("somebody's file")
    assert "sockets are gone" in said(folder, told(folder))


def test_a_stopped_process_is_told_from_one_that_hangs(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    try:
        os.waitpid(child.pid, os.WUNTRACED)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / CLIENT_SOCKET))
            beat(folder, 6, 6)
            assert f"(pid {child.pid}) is stopped" in said(folder, told(folder, pid=child.pid))
    finally:
        child.kill()
        child.wait()


@pytest.mark.asyncio
async def test_the_writer_lives_only_when_a_transaction_ended(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(heart, "PERIOD_S", 0.01)
    asked: list[asyncio.Future[object]] = []

    def submit() -> asyncio.Future[object]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    alive: list[int] = []
    made = heart.Heart(DataDir(folder, folder), alive=lambda: alive.append(1))
    commits = [0]
    made.watch(submit, lambda: commits[0])
    task = asyncio.create_task(made.run())
    try:
        await until(lambda: len(alive) > 3)
        before = pulse.read(folder)
        await asyncio.sleep(0.5)
        after = pulse.read(folder)
        assert before and after and len(asked) == 1  # one question, however long it takes
        assert after.writer >= before.writer + 0.5 and after.loop < 0.4
        asked[0].set_exception(OSError("full"))  # an answer all the same
        await until(lambda: len(asked) == 2)
        await until(lambda: (seen := pulse.read(folder)) is not None and seen.writer < 0.1)
        await asyncio.sleep(0.2)
        commits[0] += 1  # somebody else's transaction proves as much
        await until(lambda: (seen := pulse.read(folder)) is not None and seen.writer < 0.1)
        assert len(asked) == 2
    finally:
        task.cancel()
    made.close()
    assert pulse.read(folder) is None


@pytest.mark.asyncio
async def test_a_runtime_folder_that_cannot_be_had_any_more_moves(folder: Path, monkeypatch) -> None:
    """The end of a login takes $XDG_RUNTIME_DIR away; only root could make it again."""
    old, new = folder / "old", folder / "new"
    for each in (old, new):
        each.mkdir(mode=0o700)
    monkeypatch.setattr("artd_schema.paths.runtime_dir", lambda _data, create=True: new)
    data = DataDir(folder, old)
    sockets = Sockets(data)
    bound: list[str] = []

    class Router:
        def bind_again(self) -> None:
            bound.append(sockets.clients.address)

    assert not sockets.mend()  # nothing listens yet
    sockets.watch(Router())
    assert sockets.mend() and data.runtime == new and bound == [f"ipc://{new / CLIENT_SOCKET}"]
    sockets.forget()
    assert not sockets.mend()
