"""wire on real ipc sockets: what cannot be decoded, who is gone, and who speaks."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest
import zmq

from artd.net.router import Local, OverLimit, Router, WorkerWire
from artd.net.under_way import UnderWay
from artd_schema.codec import MAGIC, Codec, WireError
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.awake import until
from tests.fakes.rows import settle

pytestmark = pytest.mark.asyncio
TO_WORKER: Codec[w.ToWorker] = Codec(w.ToWorker)


@pytest.fixture
def folder():
    """Short: a socket's path has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="artd-w"))
    yield path
    shutil.rmtree(path)


@contextlib.asynccontextmanager
async def open_router(folder, kind=w.FromWorker, max_message=1 << 20, at=None, **more):
    taken: list = []
    router = Router(at or Local(folder / "w.sock"), Codec(kind), max_message, lambda *m: taken.append(m), **more)
    router.bind()
    task = asyncio.ensure_future(router.run())
    context = zmq.Context()

    def dealer(identity: bytes):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(router.endpoint)
        return socket

    try:
        yield router, dealer, taken
    finally:
        await settle(task)
        router.close()
        context.destroy(linger=0)


async def test_messages_come_with_their_bulk_and_answers_go_back(folder):
    async with open_router(folder) as (router, dealer, taken):
        peer = dealer(b"trainer:1")
        peer.send_multipart(TO_WORKER.encode(w.Accepted(job=1, fence=2), [b"x", b""]))
        await until(lambda: taken)
        assert taken == [(b"trainer:1", w.Accepted(job=1, fence=2), [b"x", b""])]
        assert router.send(b"trainer:1", w.Ack(job=1, fence=2), [b"more"])
        assert TO_WORKER.decode(peer.recv_multipart()) == (w.Ack(job=1, fence=2), [b"more"])


JUNK = [
    [b""],
    [MAGIC],
    [b"A2", b"\x80"],
    [MAGIC, b""],
    [MAGIC, b"\xc1"],
    [MAGIC, b"\x81\xa1t\xa4nope"],
    [MAGIC, b"\x81\xa1t\xa7staged"],
    [MAGIC, b"\x91" * 100_000],
    [MAGIC, b"\x81\xa1t\xa2\xff\xff"],
    [b"\xff" * 1000],
]


async def test_what_cannot_be_decoded_is_counted_and_dropped(folder):
    async with open_router(folder) as (router, dealer, taken):
        peer = dealer(b"\xff\x00odd")
        for frames in JUNK:
            peer.send_multipart(frames)
        peer.send_multipart(TO_WORKER.encode(w.Beat()))
        await until(lambda: taken)
        assert router.undecodable == len(JUNK) and [m for _, m, _ in taken] == [w.Beat()]


@pytest.mark.parametrize("frames", JUNK)
async def test_the_codec_raises_nothing_else(frames):
    for codec in (TO_WORKER, Codec(w.FromWorker), Codec(api.Request), Codec(api.Reply)):
        with pytest.raises(WireError):
            codec.decode(frames)


async def test_a_peer_that_is_not_there_is_told(folder):
    async with open_router(folder) as (router, dealer, taken):
        assert router.send(b"nobody", w.Exit(grace_s=1.0)) is False
        peer = dealer(b"engine:1")
        peer.send_multipart(TO_WORKER.encode(w.Beat()))
        await until(lambda: taken)
        assert router.send(b"engine:1", w.Exit(grace_s=1.0))
        peer.close(linger=0)
        await until(lambda: not router.send(b"engine:1", w.Exit(grace_s=1.0)))


async def test_a_peer_that_does_not_read_does_not_hold_the_loop(folder):
    async with open_router(folder) as (router, dealer, taken):
        peer = dealer(b"slow")
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.send_multipart(TO_WORKER.encode(w.Beat()))
        await until(lambda: taken)
        bulk = [b"x" * 10_000]
        sent = [router.send(b"slow", w.Exit(grace_s=1.0), bulk) for _ in range(30_000)]
        assert sent[0] and not sent[-1]


async def test_a_frame_over_the_fuse_ends_that_peer_only(folder):
    async with open_router(folder, max_message=1000) as (_, dealer, taken):
        large, small = dealer(b"large"), dealer(b"small")
        large.send_multipart(TO_WORKER.encode(w.Beat(), [b"x" * 5000]))
        small.send_multipart(TO_WORKER.encode(w.Beat(), [b"x" * 900]))
        await until(lambda: taken)
        await asyncio.sleep(0.1)
        assert [peer for peer, _, _ in taken] == [b"small"]


async def test_the_frames_of_a_message_are_summed(folder):
    """The limit is the daemon's, whatever a client checks: each frame alone is below it."""
    refused = []
    async with open_router(folder, max_message=1000, refuse=lambda *a: refused.append(a)) as (_, dealer, taken):
        peer = dealer(b"c")
        peer.send_multipart(TO_WORKER.encode(w.Beat(), [b"x" * 900] * 12))
        peer.send_multipart(TO_WORKER.encode(w.Beat(), [b"x" * 900]))
        await until(lambda: taken)
        ((who, frames, error),) = refused
        assert who == b"c" and isinstance(error, OverLimit) and "10810 bytes, the daemon accepts" in str(error)
        assert frames == TO_WORKER.encode(w.Beat()), "its bulk was kept"


async def test_nothing_is_read_while_too_much_is_under_way(folder):
    under_way = UnderWay(10_000)
    async with open_router(folder, under_way=under_way, waiting=2) as (_, dealer, taken):
        peer = dealer(b"c")
        under_way.take(10_000)
        for _ in range(5):
            peer.send_multipart(TO_WORKER.encode(w.Beat(), [b"x" * 1000]))
        await asyncio.sleep(0.3)
        assert not taken
        under_way.give(1)
        await until(lambda: len(taken) == 5)


async def test_a_burst_is_taken_whole_and_in_order(folder):
    async with open_router(folder) as (_, dealer, taken):
        peer = dealer(b"p")
        for number in range(2000):
            peer.send_multipart(TO_WORKER.encode(w.Accepted(job=number, fence=1)))
        await until(lambda: len(taken) == 2000)
        assert [m.job for _, m, _ in taken] == list(range(2000))


async def test_the_socket_is_private_and_goes_with_the_router(folder):
    async with open_router(folder) as (router, _, _):
        assert (folder / "w.sock").exists() and router.endpoint == f"ipc://{folder}/w.sock"
    assert not (folder / "w.sock").exists()


async def test_a_socket_that_is_shut_keeps_who_is_connected_and_is_not_lost(folder):
    at = Local(folder / "w.sock")
    async with open_router(folder, at=at) as (router, dealer, taken):
        early = dealer(b"early")
        early.send_multipart(TO_WORKER.encode(w.Beat()))
        await until(lambda: len(taken) == 1)
        at.shut()
        assert not at.is_lost() and not (folder / "w.sock").exists()
        late = dealer(b"late")
        late.send_multipart(TO_WORKER.encode(w.Beat()))
        early.send_multipart(TO_WORKER.encode(w.Beat()))
        await until(lambda: len(taken) == 2)
        await asyncio.sleep(0.2)
        assert [peer for peer, _, _ in taken] == [b"early", b"early"]
        router.bind_again()  # somebody tidied up the folder
        assert not (folder / "w.sock").exists()
        at.open()
        await until(lambda: len(taken) == 3)
        assert taken[-1][0] == b"late" and not at.is_lost()


async def test_a_request_that_cannot_be_decoded_is_still_answered_when_it_has_a_number(folder):
    answers = []
    async with open_router(folder, api.Request, refuse=lambda *a: answers.append(a)) as (_, dealer, taken):
        peer = dealer(b"c")
        bad = {"id": 7, "op": {"t": "createrun", "name": "r", "spec": {"model": "/m", "group_size": 0}}}
        peer.send_multipart(TO_WORKER.encode(bad))
        peer.send_multipart([MAGIC, b"junk"])
        await until(lambda: len(answers) == 2)
        (name, frames, error) = answers[0]
        assert name == b"c" and "group_size" in str(error) and frames[0] == MAGIC and not taken


async def test_who_is_who(folder):
    async with open_router(folder) as (router, dealer, taken):
        wire = WorkerWire(router)
        assert wire.send("trainer", w.Exit(grace_s=0.0)) is False
        peer = dealer(b"trainer:4")
        peer.send_multipart(TO_WORKER.encode(w.Beat()))
        await until(lambda: taken)
        assert wire.who(b"trainer:4") is None and wire.spawn("trainer") is None
        wire.register("trainer", 4, b"trainer:4")
        assert wire.who(b"trainer:4") == ("trainer", 4) and wire.spawn("trainer") == 4
        assert wire.send("trainer", w.Exit(grace_s=0.0)) and not wire.send("engine", w.Exit(grace_s=0.0))
        wire.forget("trainer", 3)
        assert wire.spawn("trainer") == 4
        wire.forget("trainer", 4)
        assert wire.spawn("trainer") is None
        assert not wire.send("trainer", w.Exit(grace_s=0.0)) and wire.who(b"trainer:4") is None


async def test_a_socket_that_is_gone_is_bound_again_and_old_peers_stay(folder):
    async with open_router(folder) as (router, dealer, taken):
        old = dealer(b"old:1")
        old.send_multipart(TO_WORKER.encode(w.Accepted(job=1, fence=1)))
        await until(lambda: len(taken) == 1)
        peers = []
        for number in (2, 3):
            (folder / "w.sock").unlink()
            assert router._at.is_lost()
            router.bind_again()
            assert not router._at.is_lost()
            peers.append(dealer(f"new:{number}".encode()))
            peers[-1].send_multipart(TO_WORKER.encode(w.Accepted(job=number, fence=1)))
            await until(lambda number=number: any(each[1].job == number for each in taken))
        await asyncio.sleep(0.1)  # libzmq closes the older listeners some time later
        assert not router._at.is_lost() and [path.name for path in folder.iterdir()] == ["w.sock"]
        assert router.send(b"old:1", w.Ack(job=1, fence=1))
