"""The status is true: a daemon that is stopped, hung or unreachable is not called healthy, and reachable again by itself."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from artd.health import pulse
from artd_client import Client
from artd_schema import paths
from tests.daemon.rig import ROOT, SPEC, Rig, fill

DEGRADED = 4
WITHIN_S = 10.0


def status(rig: Rig) -> tuple[int, dict[str, Any]]:
    """Exit code and document of `artctl status --json`."""
    command = [sys.executable, "-m", "artd.cli.ctl", "status", "--json", "--data-dir", str(rig.data)]
    told = subprocess.run(command, cwd=ROOT, env=rig.environment(), capture_output=True, text=True, timeout=30)
    return told.returncode, json.loads(told.stdout)


def degraded(rig: Rig) -> dict[str, Any]:
    """The document, as soon as it says degraded."""
    began = time.monotonic()
    while (found := status(rig))[0] != DEGRADED:
        assert time.monotonic() - began < WITHIN_S, found
        time.sleep(0.1)
    return found[1]


def healthy(rig: Rig) -> None:
    rig.until(lambda: status(rig)[0] == 0, "a healthy status")


def test_a_stopped_daemon_is_degraded_and_told_how_to_go_on(rig: Rig) -> None:
    rig.start()
    healthy(rig)
    os.kill(rig.pid, signal.SIGSTOP)
    try:
        told = degraded(rig)
    finally:
        os.kill(rig.pid, signal.SIGCONT)
    assert told["health"] == "degraded" and told["next"] == f"kill -CONT {rig.pid}"
    healthy(rig)
    assert rig.stop() == 0


def test_a_runtime_folder_that_is_removed_is_made_again_and_everybody_reaches_it(rig: Rig) -> None:
    async def run() -> None:
        rig.start()
        async with Client(rig.data, timeout=30.0) as old:
            before = await old.run("r", model=rig.model, **SPEC)
            await fill(before, 1)
            await before.wait(1)
            folder = paths.runtime_dir(rig.data, create=False)
            shutil.rmtree(folder)
            rig.until(lambda: (folder / paths.CLIENT_SOCKET).is_socket(), "the sockets")
            healthy(rig)
            async with Client(rig.data, timeout=30.0) as new:  # one that connects now
                assert (await new.runs())[0]["name"] == "r"
            spawn = rig.one("SELECT spawn FROM process WHERE kind = 'trainer'")
            os.kill(rig.worker_pid("trainer"), signal.SIGKILL)  # the next one connects by the new socket
            rig.until(lambda: rig.one("SELECT spawn FROM process WHERE kind = 'trainer'") > spawn, "another trainer")
            await fill(before, 2)
            await before.wait(2)  # by the connection that there was
        assert rig.stop() == 0
        assert not [path.name for path in folder.iterdir() if path.is_socket() or path.name == pulse.FILE]

    asyncio.run(run())


@pytest.mark.slow
def test_a_socket_that_somebody_put_a_file_in_place_of_is_taken_back(rig: Rig) -> None:
    rig.start()
    path = Path(paths.read_daemon_file(rig.data).socket.removeprefix("ipc://"))
    path.unlink()
    path.write_text("mine")
    rig.until(path.is_socket, "the socket")
    healthy(rig)
    assert rig.stop() == 0


def test_the_gateway_keeps_its_address_and_what_comes_meanwhile_waits(rig: Rig) -> None:
    """OpenAI clients in the field hold the address for life."""

    def models(address: str, token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.get(f"{address}/v1/models", headers=headers, trust_env=False, timeout=60).status_code

    rig.start()
    told = json.loads((rig.data / "gateway.json").read_text())
    assert models(told["url"], told["token"]) == 200
    for _ in range(2):
        os.kill(rig.worker_pid("gateway"), signal.SIGKILL)
        assert models(told["url"], told["token"]) == 200  # at once, and without a second try
    assert json.loads((rig.data / "gateway.json").read_text()) == told
    assert rig.one("SELECT restarts FROM process WHERE kind = 'gateway'") == 2
    rig.kill()
    host, _, port = told["url"].removeprefix("http://").rpartition(":")
    with socket.create_server((host, int(port))):  # somebody has the port at the next boot
        rig.start()
        other = json.loads((rig.data / "gateway.json").read_text())
        assert other["url"] != told["url"] and models(other["url"], told["token"]) == 200
        assert rig.stop() == 0


def test_a_start_removes_what_the_dead_left_and_nothing_of_the_living(rig: Rig) -> None:
    rig.start()
    rig.kill()
    runtime = paths.runtime_dir(rig.data, create=False)
    (runtime / "e1-0-22" / "t").mkdir(parents=True)
    (runtime / "e1-0-22" / "t" / "vllm_dist_x").touch()
    (runtime / "t1-8").mkdir()
    (runtime / "not-a-spawn").mkdir()
    (runtime / "e1-0-9" / "t").mkdir(parents=True)
    living = subprocess.Popen(["sleep", "60"], env={"TMPDIR": str(runtime / "e1-0-9" / "t")})
    working = subprocess.Popen(["sleep", "60"], cwd=runtime / "t1-8")
    mine, other = (Path(f"/dev/shm/sem.mp-{name}{os.getpid()}") for name in ("mine", "other"))
    try:
        for path in (mine, other):
            path.touch()
        (rig.data / "logs" / "engine-1-0-server.scratch").write_text(f"{mine.stat().st_ino} {mine}\n")
        rig.start()
        left = {path.name for path in runtime.iterdir() if path.is_dir()}
        assert left == {
            "e1-0-9",
            "t1-8",
            "not-a-spawn",
            f"g{rig.one('SELECT spawn FROM process WHERE kind = ?', 'gateway')}",
        }
        assert (mine.exists(), other.exists()) == (False, True)
        assert rig.stop() == 0
    finally:
        for path in (mine, other):
            path.unlink(missing_ok=True)
        for child in (living, working):
            child.kill()
            child.wait()


def test_a_sighup_drains_and_a_second_one_does_not_force(rig: Rig) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by the daemon too
    rig.start()
    signal.signal(signal.SIGHUP, before)
    os.kill(rig.pid, signal.SIGHUP)
    os.kill(rig.pid, signal.SIGHUP)
    assert rig.died() == 0
    rig.assert_nothing_lives()
    assert rig.one("SELECT value FROM meta WHERE key = 'clean'") == "1"
