"""A daemon that ended by itself comes back: by a service manager, or by a keeper of its own; and not after `artd stop`."""

from __future__ import annotations

import configparser
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd.cli import keep, main
from artd.cli.artd import start
from artd_schema.paths import LOGS, read_daemon_file
from tests.awake import SOON_S, wait_until
from tests.daemon.rig import ROOT, Rig

DAEMON = """
import os, sys, time
from pathlib import Path
from artd.datadir.lock import describe
from artd_schema.paths import write_daemon_file
import dataclasses
data, code = Path(sys.argv[1]), int(sys.argv[2])
with (data / "starts").open("a") as out:
    out.write(f"{os.getpid()}\\n")
if sys.argv[3] == "ready":
    write_daemon_file(data, dataclasses.replace(describe("9", 1.0), state="ready"))
    time.sleep(0.4)
sys.exit(code)
"""


def start_keeper(data: Path, code: int, state: str, deaths: int = 3, base_s: float = 0.05) -> subprocess.Popen[str]:
    """A keeper of scripted daemons that end with this code."""
    (data / LOGS).mkdir(parents=True)
    program = f"""
        import sys
        from pathlib import Path
        from artd.cli import keep
        from artd.supervise.backoff import Policy
        keep.POLICY = Policy(base_s={base_s}, deaths={deaths})
        data = Path({str(data)!r})
        sys.exit(keep.keep([sys.executable, "-c", {DAEMON!r}, str(data), {str(code)!r}, {state!r}], data))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def starts(data: Path) -> list[str]:
    path = data / "starts"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize(
    ("code", "state", "expected"), [(70, "ready", 3), (0, "ready", 1), (130, "ready", 1), (1, "refused", 1)]
)
def test_what_ended_by_itself_starts_again_until_the_limit(
    tmp_path: Path, code: int, state: str, expected: int
) -> None:
    process = start_keeper(tmp_path, code, state)
    _, said = process.communicate(timeout=SOON_S)
    assert process.returncode == code and len(starts(tmp_path)) == expected
    assert ("it stays down" in said) == (expected == 3)
    assert keep.find_keeper(tmp_path) is None


def test_a_stop_meets_a_keeper_between_two_daemons(tmp_path: Path) -> None:
    process = start_keeper(tmp_path, 70, "ready", base_s=60.0)
    wait_until(lambda: len(starts(tmp_path)) == 2)
    wait_until(lambda: not (found := read_daemon_file(tmp_path)) or not found.alive(), what="the second one's end")
    assert main.main(["stop", "--data-dir", str(tmp_path)]) == 0
    try:
        process.wait(0)  # `stop` returned when it was gone
    finally:
        process.kill()
        process.communicate()
    assert len(starts(tmp_path)) == 2


def artd(rig: Rig, *words: str, verb: str = "start") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "artd.cli.main", verb, "--data-dir", str(rig.data), "--config", str(rig.config)]
    return subprocess.run(
        [*command, *words], cwd=ROOT, env=rig.environment(), capture_output=True, text=True, timeout=SOON_S
    )


def test_a_real_daemon_comes_back_and_stop_is_the_end(rig: Rig) -> None:
    assert artd(rig, "--detach", "--restart").returncode == 0
    first = read_daemon_file(rig.data)
    assert first is not None
    again = artd(rig, "--detach")  # idempotent for scripts
    assert again.returncode == 0 and f"runs already on {rig.data}: pid {first.pid}" in again.stdout
    assert artd(rig).returncode == 6  # but nobody else can become the daemon
    os.kill(first.pid, signal.SIGKILL)

    def back() -> bool:
        found = read_daemon_file(rig.data)
        return found is not None and found.pid != first.pid and found.state == "ready"

    rig.until(back, "the next daemon")
    assert artd(rig, verb="stop").returncode == 0
    assert artd(rig, verb="stop").returncode == 0  # there is none
    rig.assert_nothing_lives()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """systemd's end of sd_notify."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0artd-test-{os.getpid()}")
        listener.settimeout(SOON_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@artd-test-{os.getpid()}")
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        yield listener


def test_the_unit_starts_a_daemon_that_tells_its_manager(
    rig: Rig, manager: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["systemd", "--data-dir", str(rig.data), "--config", str(rig.config)]) == 0
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(capsys.readouterr().out)
    service = unit["Service"]
    assert (service["Type"], service["Restart"], service["KillMode"]) == ("notify", "on-failure", "mixed")
    assert int(service["LimitNOFILE"]) > 4096 and int(service["WatchdogSec"]) == 30
    words = shlex.split(service["ExecStart"])
    process = subprocess.Popen(words, cwd=ROOT, env=rig.environment(), stderr=subprocess.DEVNULL)
    try:
        heard = [manager.recv(100).decode()]
        while heard[-1] == "WATCHDOG=1":
            heard.append(manager.recv(100).decode())
        assert heard[-1] == "READY=1"
        assert (found := read_daemon_file(rig.data)) is not None and found.state == "ready"
        assert manager.recv(100) == b"WATCHDOG=1"
        process.terminate()
        while (word := manager.recv(100).decode()) != "STOPPING=1":
            assert word == "WATCHDOG=1"
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.wait()
    rig.assert_nothing_lives()


@pytest.mark.parametrize("wrong", ["-1", "0", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_usage(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["start", "--detach", "--timeout", wrong, "--data-dir", str(tmp_path)]) == 2
    assert "is not a number of seconds above 0" in capsys.readouterr().err


def test_a_daemon_that_stops_is_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.daemon_probe, "find_daemon", lambda _: start.daemon_probe.Daemon("draining", None))
    began = time.monotonic()
    assert main.main(["start", "--detach", "--data-dir", str(tmp_path)]) == 6
    assert time.monotonic() - began < start.READY_S / 2
