"""What another user or another machine finds: closed folders, closed sockets, loopback only, and CURVE for listed keys."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys

import pytest
import zmq
import zmq.asyncio

from artd_client import Client, DaemonNotRunning, NotAllowed, Remote, errors
from artd_schema.codec import Codec
from artd_schema.paths import runtime_dir
from artd_schema.wire import client_api as api
from tests.awake import SOON_S
from tests.daemon.rig import ROOT, fill, turn
from tests.listening import beyond_loopback, listening

pytestmark = pytest.mark.asyncio


def artctl(rig, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "artd.cli.ctl", *words, "--data-dir", str(rig.data)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def pids(rig) -> list[int]:
    return [int(line.split(":")[0]) for line in rig.living()]


async def test_nobody_else_gets_in_from_this_machine(rig):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        await run.wait(1, timeout=60)
        runtime = runtime_dir(rig.data)
        for folder in (rig.data, runtime, rig.data / "blobs", rig.data / "checkpoints", rig.data / "logs"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        for path in [*runtime.rglob("*.sock"), *rig.data.glob("artd.db*"), rig.data / "gateway.json"]:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert len(list(runtime.rglob("*.sock"))) >= 2
        open_to_others = [p for p in rig.data.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o077]
        assert not open_to_others
        found = listening(pids(rig))
        assert {(kind, address) for kind, address, _ in found} == {("tcp", "127.0.0.1")}, found  # the gateway
        assert not beyond_loopback(pids(rig))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
async def test_a_peer_of_another_user_is_turned_away(rig):
    """The socket's folder opened by mistake: the kernel's word for the peer's uid still keeps strangers out."""
    rig.start()
    runtime = runtime_dir(rig.data)
    for folder in (runtime, *runtime.parents[: len(runtime.parents) - 2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    endpoint = runtime / "client.sock"
    endpoint.chmod(0o666)
    ask = (
        "import os, sys, zmq\n"
        "os.setuid(int(sys.argv[2]))\n"
        "s = zmq.Context().socket(zmq.DEALER); s.setsockopt(zmq.LINGER, 0); s.connect('ipc://' + sys.argv[1])\n"
        "s.send_multipart([b'A1', bytes.fromhex(sys.argv[3])])\n"
        "print('answered' if s.poll(1500) else 'silence')\n"
    )
    hello = Codec(api.Request).encode(api.Request(id=1, op=api.Hello(protocol=1, client="x")))[1].hex()

    def asked(uid: int) -> str:
        command = [sys.executable, "-c", ask, str(endpoint), str(uid), hello]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
        return done.stdout.strip() or done.stderr

    try:
        assert asked(os.getuid()) == "answered"
        assert asked(65534) == "silence"
    finally:
        for folder in (runtime, runtime.parent):
            folder.chmod(0o700)


async def test_a_client_of_another_machine(rig, tmp_path):
    port = free_port()
    with rig.config.open("a") as file:
        file.write(f'[remote]\nbind = "tcp://127.0.0.1:{port}"\n')
    rig.start()
    at, laptop, stranger = f"tcp://127.0.0.1:{port}", tmp_path / "laptop.key", tmp_path / "stranger.key"
    added = artctl(rig, "key", "add", "laptop", "--out", str(laptop))
    assert added.returncode == 0, added.stderr
    server = artctl(rig, "key", "server").stdout.strip()
    assert server in added.stdout and stat.S_IMODE(laptop.stat().st_mode) == 0o600
    secret = re.search(r'secret-key = "(.{40})"', laptop.read_text())[1]
    assert not any(secret in p.read_text() for p in (rig.data / "keys").rglob("*") if p.is_file())
    assert artctl(rig, "key", "add", "laptop", "--out", str(tmp_path / "x")).returncode == 1
    async with rig.run() as (_, mine), Client(remote=Remote(at, server, laptop), timeout=60.0) as remote:
        run = await remote.run("r")
        for number in range(2):
            await run.submit("g", float(number), turns=[turn(number)], key=f"k{number}")
        assert (await mine.wait(1, timeout=60)).step == 1
        assert [row["name"] for row in await remote.runs()] == ["r"]
        with pytest.raises(errors.Invalid, match="finite"):
            await run.submit("g2", float("nan"), turns=[turn(1)])
        # Somebody whose key is not listed, somebody with no key at all, and a key that was taken back.
        subprocess.run([sys.executable, "-m", "artd.cli.ctl", "key", "add", "s", "--out", str(stranger), "--data-dir",
                        str(tmp_path / "elsewhere")], cwd=ROOT, check=True, capture_output=True)  # fmt: skip
        with pytest.raises(NotAllowed, match="artctl key add"):
            async with Client(remote=Remote(at, server, stranger), timeout=60.0):
                pass
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(at)
        await plain.send_multipart(Codec(api.Request).encode(api.Request(id=1, op=api.Hello(protocol=1, client="x"))))
        assert not await plain.poll(500)
        context.destroy(0)
        assert artctl(rig, "key", "remove", "laptop").returncode == 0
        with pytest.raises(NotAllowed):
            async with Client(remote=Remote(at, server, laptop), timeout=60.0):
                pass
        public = re.search(r'public-key = "(.{40})"', laptop.read_text())[1]
        assert artctl(rig, "key", "add", "again", "--public", public).returncode == 0
        assert artctl(rig, "key", "list").stdout == f"again\t{public}\n"
        async with Client(remote=Remote(at, server, laptop), timeout=60.0) as again:
            assert len(await again.runs()) == 1
        with pytest.raises(DaemonNotRunning, match="public key"):
            async with Client(remote=Remote(at, public, laptop), timeout=1.5):
                pass


async def test_a_remote_endpoint_that_cannot_be_had_is_told_at_start(rig):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with rig.config.open("a") as file:
            file.write(f'[remote]\nbind = "tcp://127.0.0.1:{taken.getsockname()[1]}"\n')
        rig.start(wait=False)
        assert rig.process.wait(20) == 1
    assert "remote.bind" in rig.log()


async def test_a_gateway_port_that_is_taken_is_told_at_once(rig):
    """A gateway that cannot listen is no crash to be tried again: five starts with their back-off take half a minute."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with rig.config.open("a") as file:
            file.write(f"[gateway]\nport = {port}\n")
        rig.start(wait=False)
        assert rig.process.wait(SOON_S) == 1
    said = f"the gateway cannot listen on 127.0.0.1 port {port}: Address already in use. Next: choose another gateway.host or"
    assert said in rig.log()
    assert rig.rows("SELECT name FROM process") == [], "a worker was started"
    rig.start()
    assert rig.one("SELECT value FROM meta WHERE key = 'gateway_url'") == f"http://127.0.0.1:{port}"
    rig.restart()  # a gateway that the daemon itself left is none that takes the port
    assert rig.one("SELECT value FROM meta WHERE key = 'gateway_url'") == f"http://127.0.0.1:{port}"
