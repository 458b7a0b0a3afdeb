"""Connections without end: the daemon and its workers live, who was there is served, and who comes later gets in."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from artd_client import Client, Remote
from artd_schema import paths
from tests.attack.connections import crowd, limited, lives, open_files
from tests.awake import SOON_S, until
from tests.daemon.rig import ROOT, Rig, fill, rig, turn

pytestmark = pytest.mark.asyncio


@pytest.fixture(name="rig")
def a_rig():
    with rig() as made:
        yield made


def client_socket(rig: Rig) -> str:
    return str(paths.socket_path(paths.runtime_dir(rig.data, create=False), paths.CLIENT_SOCKET))


def listen_on_tcp(rig: Rig, folder: Path) -> tuple[int, Remote]:
    """Settings for a TCP endpoint; its port, and a client's way to it once the daemon runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    with rig.config.open("a") as file:
        file.write(f'[remote]\nbind = "tcp://127.0.0.1:{port}"\n')
    artctl = [sys.executable, "-m", "artd.cli.ctl", "key"]
    data = ["--data-dir", str(rig.data)]
    subprocess.run([*artctl, "add", "a", "--out", str(folder / "a"), *data], cwd=ROOT, check=True, capture_output=True)
    server = subprocess.run([*artctl, "server", *data], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return port, Remote(f"tcp://127.0.0.1:{port}", server.strip(), folder / "a")


async def serves(run, name: str) -> None:
    """Something durable is still taken."""
    assert not (await run.submit(name, 1.0, turns=[turn(1)], key=name)).duplicate


async def test_more_local_connections_than_descriptors(rig):
    """libzmq aborts when accept() on a Unix socket says EMFILE: it never comes to that."""
    rig.start(under=limited(512))
    async with rig.run() as (_, run):
        await run.wait(0, timeout=SOON_S)
        with crowd(socket.AF_UNIX, client_socket(rig), 150):
            await until(lambda: "files are open" in rig.log(), 15.0)
            with crowd(socket.AF_UNIX, client_socket(rig), 600) as further:
                assert not further  # nobody: who waits tries again
                await serves(run, "beside the crowd")
                await asyncio.sleep(0.2)
                lives(rig)
        await serves(run, "after the crowd")
        async with Client(rig.data, timeout=SOON_S) as later:
            assert [row["name"] for row in await later.runs()] == ["r"]


async def test_tcp_connections_without_a_key(rig, tmp_path):
    """Strangers cost nobody his place: not local clients, and after their handshake's time not those with a key."""
    port, remote = listen_on_tcp(rig, tmp_path)
    rig.start(under=limited(512))
    async with rig.run() as (_, run):
        await run.wait(0, timeout=SOON_S)
        with crowd(socket.AF_INET, ("127.0.0.1", port), 700):
            await asyncio.sleep(0.3)
            await serves(run, "beside the crowd")
            lives(rig)
            async with Client(rig.data, timeout=SOON_S) as local:
                assert len(await local.runs()) == 1
            assert open_files(rig.pid) < 512
            async with Client(remote=remote, timeout=SOON_S) as later:  # while the strangers hold on
                await serves(await later.run("r"), "with a key")


async def test_a_start_with_too_few_descriptors_is_refused_with_the_number(rig):
    rig.start(wait=False, under=limited(255))
    assert rig.died() == 1
    said = rig.log()
    assert "may open 255 files, and artd needs 256" in said and "Traceback" not in said


async def test_the_soft_limit_is_raised_to_the_hard_one(rig):
    rig.start(under=["/bin/sh", "-c", 'ulimit -Sn 200; exec "$@"', "sh"])
    limits = Path(f"/proc/{rig.pid}/limits").read_text()
    _, _, _, soft, hard, _ = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()
    assert soft == hard != "200"


async def test_a_silent_connection_is_not_kept(rig, tmp_path):
    """Each of them would cost a descriptor for ever."""
    port, _ = listen_on_tcp(rig, tmp_path)
    rig.start()
    before = open_files(rig.pid)
    with crowd(socket.AF_INET, ("127.0.0.1", port), 20):
        await until(lambda: open_files(rig.pid) >= before + 20)
        await until(lambda: open_files(rig.pid) < before + 10)


async def test_half_sent_requests_do_not_block_the_gateway(rig):
    """Half a head, half a body without a token, and an answered request after which nothing comes: none takes a place for long."""
    rig.start(under=limited(512))
    async with rig.run() as (_, run):
        await run.wait(0, timeout=SOON_S)
        host, port = run.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
        half_body = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        address = (host, int(port))
        with crowd(socket.AF_INET, address, 250, head), crowd(socket.AF_INET, address, 250, half_body):
            with crowd(socket.AF_INET, address, 100, head + b"\r\n"):
                async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
                    for _ in range(5):
                        headers = {"authorization": f"Bearer {run.api_key}", "connection": "close"}
                        answer = await http.get(f"{run.base_url}/models", headers=headers)
                        assert answer.status_code == 200 and answer.json()["data"]
            lives(rig)
        restarts = rig.one("SELECT spawn FROM process WHERE kind = 'gateway'")
        assert restarts == 1


async def test_everything_at_once_at_a_limit_of_4096(rig, tmp_path):
    """2,000 local clients, 500 TCP connections without a key and 500 half-sent requests: a step is trained meanwhile."""
    port, remote = listen_on_tcp(rig, tmp_path)
    rig.start(under=limited(4096))
    async with rig.run() as (_, run):
        await run.wait(0, timeout=SOON_S)
        host, gateway = run.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
        with (
            crowd(socket.AF_UNIX, client_socket(rig), 2000) as local,
            crowd(socket.AF_INET, ("127.0.0.1", port), 500),
            crowd(socket.AF_INET, (host, int(gateway)), 500, head),
        ):
            assert len(local) == 2000, "the socket was shut before"
            spawns = rig.rows("SELECT name, spawn FROM process ORDER BY name")
            await fill(run, 1)
            await run.wait(1, timeout=SOON_S)
            async with Client(rig.data, timeout=SOON_S) as later, httpx.AsyncClient(trust_env=False) as http:
                assert len(await later.runs()) == 1
                answer = await http.get(
                    f"{run.base_url}/models", headers={"authorization": f"Bearer {run.api_key}"}, timeout=10.0
                )
                assert answer.status_code == 200
            async with Client(remote=remote, timeout=SOON_S) as far:
                await serves(await far.run("r"), "with a key")
            lives(rig)
        assert rig.rows("SELECT name, spawn FROM process ORDER BY name") == spawns, "a worker died"
