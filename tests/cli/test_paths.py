"""Data and runtime folders, and the lock of one daemon per data folder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from artd.datadir import lock
from artd.supervise import procfs
from artd_schema import paths
from tests.process import helpers


def test_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.data_dir() == tmp_path / "share/artd/data"
    monkeypatch.setenv("ARTD_DATA_DIR", "relative")
    assert paths.data_dir() == Path.cwd() / "relative"
    assert paths.data_dir("/given") == Path("/given")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # the XDG rules: counts as unset
    assert paths.default_data_dir() == Path.home() / ".local/share/artd/data"


def test_runtime_dir_is_private_and_one_per_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path(f"/tmp/artd-test-{os.getpid()}")
    short.mkdir()
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        one = paths.runtime_dir(tmp_path / "one")
        assert one.parent == short / "artd" and one.stat().st_mode & 0o777 == 0o700
        assert paths.runtime_dir(tmp_path / "two") != one
        (tmp_path / "link").symlink_to(tmp_path / "one")
        assert paths.runtime_dir(tmp_path / "link") == one
        one.chmod(0o755)
        with pytest.raises(paths.UnsafeDir, match="open to others"):
            paths.runtime_dir(tmp_path / "one")
        one.rmdir()
        one.symlink_to("/tmp")
        with pytest.raises(paths.UnsafeDir, match="is not a folder"):
            paths.runtime_dir(tmp_path / "one")
    finally:
        subprocess.run(["rm", "-r", str(short)], check=True)


def test_a_folder_of_somebody_else_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    monkeypatch.setattr(paths.os, "getuid", lambda: 4_242_424)
    try:
        with pytest.raises(paths.UnsafeDir, match="belongs to uid .* set XDG_RUNTIME_DIR to a folder of your own"):
            paths.runtime_dir(tmp_path)
    finally:
        Path("/tmp/artd-4242424").rmdir()


def test_socket_paths_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(paths.UnsafeDir, match="too long for sockets"):
        paths.runtime_dir(tmp_path)
    assert len(str(paths.socket_path(Path("/a"), "b" * 104))) == 107
    with pytest.raises(paths.UnsafeDir, match="108 bytes"):
        paths.socket_path(Path("/a"), "b" * 105)


def test_process_ticks_tell_the_living_from_the_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = paths.process_ticks(child.pid)
    assert ticks is not None and ticks >= (paths.process_ticks(os.getpid()) or 0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert paths.process_ticks(child.pid) is None, "a zombie is not alive"
    child.communicate()
    assert paths.process_ticks(child.pid) is None


def test_a_process_whose_first_thread_has_ended_lives() -> None:
    with subprocess.Popen(helpers.python(helpers.LEADERLESS)) as child:
        helpers.until(lambda: (now := procfs.read_stat(child.pid)) is not None and now.state == "Z")
        assert paths.process_ticks(child.pid) is not None
        child.kill()


def test_daemon_file(tmp_path: Path) -> None:
    assert paths.read_daemon_file(tmp_path) is None
    me = lock.describe("1", 2.0)
    paths.write_daemon_file(tmp_path, me)
    assert paths.read_daemon_file(tmp_path) == me and me.alive()
    assert (tmp_path / "daemon.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "daemon.json").write_text('{"pid": 1, "ticks": 2, "boot_id": "x", "version": "9", "newer": true}')
    other = paths.read_daemon_file(tmp_path)
    assert other is not None and other.version == "9" and not other.alive()
    for broken in ("", "[]", "{}", "{"):
        (tmp_path / "daemon.json").write_text(broken)
        assert paths.read_daemon_file(tmp_path) is None


def test_one_daemon_per_folder(tmp_path: Path) -> None:
    assert not lock.held(tmp_path)
    handle = lock.acquire(tmp_path, "1.2.3", 60.0)
    assert lock.held(tmp_path)
    with pytest.raises(lock.Owned, match=rf"pid {os.getpid()}, version 1\.2\.3"):
        lock.acquire(tmp_path, "1", 60.0)
    handle.close()
    assert not lock.held(tmp_path)
    lock.acquire(tmp_path, "1", 60.0).close()


def test_the_lock_dies_with_its_holder_and_is_not_inherited(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, pathlib; from artd.datadir import lock; lock.acquire(pathlib.Path(sys.argv[1]), '1', 1.0);"
        "subprocess.Popen(['sleep', '5'], stdout=subprocess.DEVNULL, close_fds=False); print('held', flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    assert lock.held(tmp_path)
    child.kill()
    child.communicate()
    assert not lock.held(tmp_path)


def test_looking_at_the_lock_keeps_no_daemon_out(tmp_path: Path) -> None:
    lock.acquire(tmp_path, "1", 60.0).close()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            lock.held(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            lock.acquire(tmp_path, "1", 60.0).close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
