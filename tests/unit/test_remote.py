"""remote on real TCP sockets: whose key is looked up, and what a failing look-up means to those who come next."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from artd.net import remote
from artd.net.descriptors import raise_limit
from artd.net.keys import Keys
from artd.net.remote import ClientWire
from artd.net.router import Local, NotAllowed
from artd_schema import PROTOCOL
from artd_schema.codec import Codec
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fakes.rows import settle

pytestmark = pytest.mark.asyncio
HELLO = Codec(api.Request).encode(api.Request(id=1, op=api.Hello(protocol=PROTOCOL, client="t")))


class Wired:
    """A ClientWire on a free port that answers every request with Done."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys(folder)
        self.public, self.secret = zmq.curve_keypair()
        self.keys.allow("laptop", self.public.decode())
        self.wire = ClientWire(
            Local(folder / "c.sock"), "tcp://127.0.0.1:*", self.keys, 1 << 20,
            self.answer,
            lambda *refused: None,
        )  # fmt: skip
        self.context = zmq.asyncio.Context()
        self.headers: list[int] = []

    def answer(self, peer: bytes, request: api.Request, bulk: list[bytes], header: int) -> None:
        self.headers.append(header)
        self.wire.send(peer, api.Reply(id=request.id, answer=api.Done()))

    def dealer(self) -> zmq.asyncio.Socket:
        """A connection with the allowed key."""
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.curve_serverkey = self.keys.server()[0].encode()
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.connect(self.wire._remote.endpoint)
        return socket

    async def asks(self, seconds: float = 10.0) -> bool:
        """Whether a client with the allowed key gets an answer on a connection of its own."""
        with self.dealer() as socket:
            await socket.send_multipart(HELLO)
            return bool(await socket.poll(int(1000 * seconds)))


@pytest_asyncio.fixture
async def wired():
    folder = Path(tempfile.mkdtemp(prefix="artd-r"))
    made = Wired(folder)
    made.wire.bind(raise_limit())
    task = asyncio.ensure_future(made.wire.run())
    yield made
    await settle(task)
    made.context.destroy(0)
    made.wire.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), OSError(errno.EIO, "broken"), RuntimeError("?")])
async def test_a_look_up_that_fails_refuses_one_client_and_no_more(wired, monkeypatch, error):
    looked_up = wired.keys.allowed
    failures = [error]

    def allowed(key):
        if failures:
            raise failures.pop()
        return looked_up(key)

    monkeypatch.setattr(wired.keys, "allowed", allowed)
    assert not await wired.asks(0.5) or not failures
    assert not failures, "nobody asked"
    assert await wired.asks()


async def test_who_is_asked_hears_how_large_the_header_was(wired):
    assert await wired.asks() and wired.headers == [len(HELLO[1])]
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as near:
        near.linger = 0
        near.connect(wired.wire.endpoint)
        large = Codec(api.Request).encode(
            api.Request(id=1, op=api.Hello(protocol=PROTOCOL, client="t" * 5000)), [b"body"]
        )
        await near.send_multipart(large)
        assert await near.poll(10_000) and wired.headers[1:] == [len(large[1])]


async def test_a_question_that_cannot_be_answered_is_not_the_last(wired, monkeypatch):
    answered = wired.wire._curve._authenticator.handle_zap_message
    failures = [ValueError("a surprise in pyzmq")]

    async def handle(question):
        if failures:
            raise failures.pop()
        await answered(question)

    monkeypatch.setattr(wired.wire._curve._authenticator, "handle_zap_message", handle)
    with contextlib.suppress(TimeoutError):
        await wired.asks(0.5)
    assert not failures and await wired.asks()


async def test_a_key_that_was_removed_counts_no_more_for_who_is_connected(wired, monkeypatch):
    monkeypatch.setattr(remote, "LOOK_S", 0.0)
    refused = []
    wired.wire._remote._refuse = lambda *refusal: refused.append(refusal)
    with wired.dealer() as socket:
        await socket.send_multipart(HELLO)
        assert await socket.poll(10_000) and await socket.recv_multipart()
        wired.keys.remove("laptop")
        await socket.send_multipart(HELLO)
        await until(lambda: refused)
        ((_, frames, error),) = refused
        assert isinstance(error, NotAllowed) and "artctl key add" in str(error) and frames == HELLO
        assert not await socket.poll(100)


async def test_a_key_that_cannot_be_read_stays_allowed_and_a_removed_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "LOOK_S", 0.0)
    keys, public = Keys(tmp_path), {name: zmq.curve_keypair()[0].decode() for name in ("laptop", "other")}
    for name, key in public.items():
        keys.allow(name, key)
    curve = remote.Curve("tcp://127.0.0.1:*", keys)
    assert curve.admit(b"1", public["laptop"]) and curve.admit(b"2", public["other"])
    file = tmp_path / "keys" / "clients" / "laptop.key"
    file.unlink()
    file.symlink_to("laptop.key")  # no read of it succeeds
    assert curve.admit(b"1", public["laptop"]) and curve.who(b"1") == "laptop"
    keys.remove("other")
    assert not curve.admit(b"2", public["other"]), "a file that cannot be read keeps no removed key"
    file.unlink()
    assert not curve.admit(b"1", public["laptop"])
