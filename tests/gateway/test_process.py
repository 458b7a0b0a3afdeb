"""The gateway as a real child process on a real ROUTER: start, serve, port in use, end, lost daemon."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from artd_schema import PROTOCOL
from artd_schema.codec import Codec
from artd_schema.data.trajectory import Turn
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import GatewayConfig
from tests.awake import SOON_S
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import merged

ROOT = Path(__file__).parents[2]


class Router:
    """The daemon's ROUTER with one gateway behind it."""

    def __init__(self, folder: str, listener: str | None = None) -> None:
        self.codec: Codec[w.FromWorker] = Codec(w.FromWorker)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.address = f"ipc://{folder}/z"
        self.socket.bind(self.address)
        self.peer = b""
        self.welcome = w.Welcome(
            worker="gateway", heartbeat_s=0.1, max_message=1 << 20, gateway=GatewayConfig(token="key")
        )
        env = {
            **os.environ,
            "ARTD_SOCKET": self.address,
            "ARTD_INSTANCE": "i",
            "ARTD_WORKER": "gateway",
            "ARTD_SPAWN": "1",
        }
        env["PYTHONPATH"] = f"{ROOT / 'schema'}:{ROOT / 'workers'}"
        with socket.create_server(("127.0.0.1", 0)) as held:
            env[w.LISTENER] = str(held.fileno()) if listener is None else listener
            self.process = subprocess.Popen(
                [sys.executable, "-m", "artd_workers.gateway"], env=env, stderr=subprocess.PIPE, text=True,
                pass_fds=(held.fileno(),),
            )  # fmt: skip

    def send(self, message: w.ToWorker, bulk: Sequence[bytes] = ()) -> None:
        self.socket.send_multipart([self.peer, *self.codec.encode(message, bulk)])

    def until(self, kind: type, seconds: float = SOON_S) -> tuple[Any, list[bytes]]:
        """The next message of a kind; others are dropped."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.socket.poll(50):
                self.peer, *frames = self.socket.recv_multipart()
                message, bulk = self.codec.decode(frames)
                if isinstance(message, kind):
                    return message, bulk
        raise AssertionError(f"no {kind.__name__} within {seconds} s")

    def greet(self) -> w.Hello:
        hello, _ = self.until(w.Hello)
        self.send(self.welcome)
        return hello

    def close(self) -> str:
        """The process's stderr, after its end."""
        self.process.kill() if self.process.poll() is None else None
        _, log = self.process.communicate()
        self.context.destroy(linger=0)
        return log


ASK = """
import httpx, json, sys
url, body = sys.argv[1:]
headers = {"authorization": "Bearer key"}
print(httpx.post(url + "/v1/completions", headers=headers, json=json.loads(body), trust_env=False, timeout=60).text)
"""


class Wired:
    """A gateway process that serves pol@3 by an engine process, and clients of it; run `idle` serves nothing."""

    def __init__(self, folder: str) -> None:
        self.router = Router(folder)
        socket_path = f"{folder}/e0"
        command = [sys.executable, "-m", "tests.gateway.fake_engine", socket_path]
        self._children = [subprocess.Popen(command, cwd=ROOT)]
        self.router.greet()
        self._url = self.router.until(w.Ready)[0].url
        while not Path(socket_path).exists():
            time.sleep(0.02)
        self.router.send(w.Route(seq=1, runs=("pol", "idle"), engines=(merged(FakeEngine(socket_path), 3, 4),)))
        self.router.until(w.RouteTaken)

    def ask(self, model: str, **body: Any) -> subprocess.Popen[str]:
        """A client process that prints the reply."""
        content = json.dumps({"model": model, "prompt": "hi"} | body)
        command = [sys.executable, "-c", ASK, self._url, content]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._children.append(child)
        return child

    def send(self, model: str) -> http.client.HTTPConnection:
        """A request that is on its way when this returns; its reply is still to be read."""
        host = self._url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=SOON_S)
        body = json.dumps({"model": model, "prompt": "hi"})
        headers = {"authorization": "Bearer key", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection

    def close(self) -> None:
        self.router.close()
        for child in self._children:
            child.kill()
            child.communicate()


@pytest.fixture
def rig(folder: str) -> Iterator[Wired]:
    rig = Wired(folder)
    yield rig
    rig.close()


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gw") as name:
        yield name


def test_it_says_hello_serves_and_ends_in_order(folder: str) -> None:
    router = Router(folder)
    try:
        hello = router.greet()
        assert (hello.kind, hello.protocol, hello.spawn) == ("gateway", PROTOCOL, 1)
        ready, _ = router.until(w.Ready)
        assert ready.url.startswith("http://127.0.0.1:")
        models = httpx.get(f"{ready.url}/v1/models", headers={"authorization": "Bearer key"}, trust_env=False)
        assert models.json()["data"] == []
        router.send(w.Route(seq=1, runs=("pol",), engines=()))
        assert router.until(w.RouteTaken)[0].seq == 1
        router.send(w.Hold(push=2, fence=1, engine="e0"))
        assert router.until(w.Held)[0].in_flight == 0
        assert router.until(w.Beat)[0].rss > 0
        router.send(w.Exit(grace_s=2.0))
        assert router.process.wait(SOON_S) == 0
    finally:
        router.close()


def test_one_exchange_over_the_real_wire(rig: Wired) -> None:
    client = rig.ask("pol", n=2)
    exchange, bulk = rig.router.until(w.Exchange)
    turns = [msgspec.msgpack.decode(frame, type=Turn) for frame in bulk]
    assert [turn.choice for turn in turns] == [0, 1]
    assert client.poll() is None
    rig.router.send(w.ExchangeAck(response_id=exchange.response_id))
    assert exchange.response_id in client.communicate(timeout=SOON_S)[0]


def test_a_gateway_without_a_socket_ends_and_says_so(folder: str) -> None:
    router = Router(folder, listener="")
    try:
        router.greet()
        down, _ = router.until(w.Down)
        assert "ARTD_LISTENER names no socket" in down.error
        assert router.process.wait(SOON_S) == 1
    finally:
        router.close()


def test_a_rejected_gateway_ends(folder: str) -> None:
    router = Router(folder)
    try:
        router.until(w.Hello)
        router.send(w.Reject(reason="unknown spawn 1"))
        assert router.process.wait(SOON_S) == 1
    finally:
        assert "unknown spawn 1" in router.close()


def test_a_broken_link_ends_the_gateway(folder: str) -> None:
    router = Router(folder)
    try:
        router.greet()
        router.until(w.Ready)
        router.socket.send_multipart([router.peer, b"A1", b"\xc1"])
        assert router.process.wait(SOON_S) == 1
    finally:
        assert "link to the daemon" in router.close()


def test_exit_answers_what_waits_and_lets_what_runs_finish(rig: Wired) -> None:
    with closing(rig.send("idle")) as waiting:
        running = rig.ask("pol")
        exchange, _ = rig.router.until(w.Exchange)  # the earlier request is in the gateway by now
        rig.router.send(w.Exit(grace_s=SOON_S))
        assert "draining" in waiting.getresponse().read().decode()
    assert rig.router.process.poll() is None
    rig.router.send(w.ExchangeAck(response_id=exchange.response_id))
    assert exchange.response_id in running.communicate(timeout=SOON_S)[0]
    assert rig.router.process.wait(SOON_S) == 0


def test_exit_without_grace_does_not_wait_for_requests(rig: Wired) -> None:
    client = rig.ask("pol")
    rig.router.until(w.Exchange)
    rig.router.send(w.Exit(grace_s=0.0))
    assert rig.router.process.wait(SOON_S / 2) is not None
    assert "Paris" not in client.communicate(timeout=SOON_S)[0]
