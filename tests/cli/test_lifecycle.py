"""`artd start` and `artd stop`: detached, refused, forced, timed out. One test runs the real daemon."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd import daemon as real_daemon
from artd.cli import keep, main
from artd.cli.artd import start, stop
from artd.datadir.lock import describe
from artd_schema import paths
from tests.awake import SOON_S

FAKE = Path(__file__).parent / "fake_daemon.py"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is waited for in vain."""
    monkeypatch.setattr(stop, "_SLACK_S", 0.3)
    if request.node.callspec.params["fake"] == "deaf":
        monkeypatch.setattr(stop, "FORCE_S", 0.5)


@pytest.fixture
def fake(data: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    data.mkdir()
    child = subprocess.Popen([sys.executable, FAKE, data, request.param], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    yield child
    child.kill()
    child.communicate()


def call(*words: str) -> int:
    return main.main(list(words))


def test_stop_without_a_daemon(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("stop", "--data-dir", str(data)) == 0
    assert f"no daemon runs on {data}" in capsys.readouterr().err


@pytest.mark.parametrize("fake", ["polite"], indirect=True)
def test_stop_waits_for_the_end(fake: subprocess.Popen[bytes], data: Path) -> None:
    assert call("stop", "--data-dir", str(data)) == 0
    assert fake.wait(SOON_S) == 0


@pytest.mark.parametrize("fake", ["slow"], indirect=True)
def test_a_second_stop_forces(
    fake: subprocess.Popen[bytes], data: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("stop", "--data-dir", str(data)) == 7
    assert f"next: artd stop --data-dir {data}   (forces it)" in capsys.readouterr().err
    assert fake.poll() is None
    assert call("stop", "--data-dir", str(data)) == 0
    assert fake.wait(SOON_S) == 0


@pytest.mark.parametrize("drain", ["0", "0.2"])
@pytest.mark.parametrize("fake", ["slow"], indirect=True)
def test_stop_with_a_deadline_forces_by_itself(fake: subprocess.Popen[bytes], data: Path, drain: str) -> None:
    started = time.monotonic()
    assert call("stop", "--drain", drain, "--data-dir", str(data)) == 0
    assert fake.wait(SOON_S) == 0 and time.monotonic() - started >= float(drain)


@pytest.mark.parametrize("fake", ["deaf"], indirect=True)
def test_a_daemon_that_does_not_end(
    fake: subprocess.Popen[bytes], data: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("stop", "--drain", "0", "--data-dir", str(data)) == 7
    assert f"next: kill -9 {fake.pid}" in capsys.readouterr().err
    assert call("stop", "--data-dir", str(data)) == 7
    assert f"next: kill -9 {fake.pid}" in capsys.readouterr().err, "it drains already: this call forces"


@pytest.fixture
def kept(data: Path, fake: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper that does not end, and passes nothing on."""
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 60"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        (data / "logs").mkdir()
        (data / "logs" / keep.FILE).write_text(_file_of(process.pid))
        yield process
        process.kill()


def _file_of(pid: int) -> str:
    told = dataclasses.replace(describe("9", 0.0), pid=pid, ticks=paths.process_ticks(pid))
    return json.dumps(dataclasses.asdict(told))


@pytest.mark.parametrize("fake", ["deaf"], indirect=True)
def test_a_stop_that_fails_names_the_daemon_and_not_its_keeper(
    fake: subprocess.Popen[bytes], kept: subprocess.Popen[bytes], data: Path, short: None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(stop, "_SEEN_S", 0.1)
    assert call("stop", "--drain", "0", "--data-dir", str(data)) == 7
    assert f"next: kill -9 {fake.pid}\n" in capsys.readouterr().err
    monkeypatch.setattr(stop, "_signal", lambda told: fake.kill())
    assert call("stop", "--drain", "0", "--data-dir", str(data)) == 7
    err = capsys.readouterr().err
    assert f"the keeper (pid {kept.pid})" in err and f"next: kill -9 {kept.pid}\n" in err


@pytest.mark.parametrize("fake", ["polite"], indirect=True)
@pytest.mark.parametrize("who", ["the keeper", "the daemon"])
def test_a_second_keeper_is_refused(
    fake: subprocess.Popen[bytes], kept: subprocess.Popen[bytes], data: Path, who: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(start, "keep", lambda *_: 0)
    lives, ends = (kept, fake) if who == "the keeper" else (fake, kept)
    ends.kill()
    ends.wait()
    assert call("start", "--restart", "--data-dir", str(data)) == 6
    assert "next: artctl status" in capsys.readouterr().err and lives.poll() is None


def test_a_keeper_removes_no_file_of_another_one(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Overwritten:
        def __init__(self, command: object, data: Path) -> None:
            self.file = data / "logs" / keep.FILE

        def run(self) -> int:
            assert json.loads(self.file.read_text())["pid"] == os.getpid()
            if others:
                self.file.write_text(_file_of(os.getppid()))
            return 0

    (data / "logs").mkdir(parents=True)
    monkeypatch.setattr(keep, "_Keeper", Overwritten)
    for others in (False, True):
        assert keep.keep([], data) == 0
        found = keep.find_keeper(data)
        assert (found.pid if found else None) == (os.getppid() if others else None)


@pytest.mark.parametrize("fake", ["polite"], indirect=True)
def test_another_process_with_the_same_pid_is_left_alone(fake: subprocess.Popen[bytes], data: Path) -> None:
    told = paths.read_daemon_file(data)
    assert told is not None
    stop._signal(paths.DaemonFile(pid=told.pid, ticks=told.ticks + 1, boot_id=told.boot_id, version=""))
    time.sleep(0.2)
    assert fake.poll() is None


@pytest.mark.parametrize("fake", ["polite"], indirect=True)
def test_a_second_daemon_is_refused(fake: subprocess.Popen[bytes], data: Path) -> None:
    command = [sys.executable, "-m", "artd.cli.main", "start", "--data-dir", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "a daemon already runs on" in done.stderr and f"pid {fake.pid}" in done.stderr
    assert fake.poll() is None


def test_a_death_at_start_shows_the_logs_end(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "logs").mkdir(parents=True)
    (data / "logs/daemon.log").write_text("words of an older daemon\n")
    (data / "artd.db").write_bytes(b"SQLite format 3\0" + b"x" * 52 + b"artd" + b"x" * 8120)
    gone = paths.DaemonFile(pid=1, ticks=1, boot_id="gone", version="1", state="ready")
    paths.write_daemon_file(data, gone)  # of a daemon that was killed
    monkeypatch.setattr(start, "TAIL", 1000)
    assert call("start", "--detach", "--data-dir", str(data)) == 1
    err = capsys.readouterr().err
    assert "file is not a database" in err and "artd ended at start with status" in err
    assert "older daemon" not in err


def test_not_ready_in_time(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spawned: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def sleeper(_command: object, **options: object) -> subprocess.Popen[bytes]:
        spawned.append(popen(["sleep", "30"], stdin=subprocess.DEVNULL))
        return spawned[0]

    monkeypatch.setattr(start.subprocess, "Popen", sleeper)
    try:
        assert call("start", "--detach", "--timeout", "0.2", "--data-dir", str(data)) == 7
    finally:
        spawned[0].kill()
        spawned[0].wait()
    assert "is not ready after 0.2 s" in capsys.readouterr().err


def test_a_data_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert call("start", "--data-dir", str(tmp_path / "file/data")) == 1
    assert "cannot be made" in capsys.readouterr().err


def test_settings_reach_the_daemon(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(real_daemon, "main", lambda settings: seen.append(settings) or 130)
    monkeypatch.setattr(start, "_log_to", lambda path, level: None)
    (tmp_path / "a.toml").write_text("[gateway]\nport = 4321\n")
    words = ("start", "--config", str(tmp_path / "a.toml"), "--log-level", "debug", "--data-dir", str(data))
    assert call(*words) == 130
    assert (seen[0].gateway.port, seen[0].log_level, seen[0].data_dir) == (4321, "debug", str(data))


def test_the_real_daemon_starts_detached_and_stops(data: Path, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"} | {"ARTD_DATA_DIR": str(data)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *words], env=env, capture_output=True, text=True, check=False, cwd=tmp_path
        )

    begun = run("artd.cli.main", "start", "--detach")
    assert begun.returncode == 0, begun.stderr
    try:
        shown = run("artd.cli.ctl", "status", "--json")
        status = json.loads(shown.stdout)
        assert shown.returncode == 0, shown
        assert (status["health"], status["daemon"]["state"]) == ("ok", "ready")
        pid = status["daemon"]["pid"]
        assert f"pid {pid}" in begun.stdout and os.getsid(pid) == pid
        assert "ready" in run("artd.cli.ctl", "logs", "daemon").stdout
        os.kill(pid, signal.SIGCONT)
    finally:
        ended = run("artd.cli.main", "stop", "--drain", "5")
    assert ended.returncode == 0, ended
    assert run("artd.cli.ctl", "status").returncode == 3
