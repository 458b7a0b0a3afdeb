"""More bytes than the daemon should hold: its memory stays bounded, and a message over the limit is refused by the daemon itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from artd_client import Client
from artd_schema import paths
from artd_schema.codec import Codec
from artd_schema.wire import client_api as api
from tests.awake import SOON_S
from tests.daemon.rig import rig, turn

pytestmark = pytest.mark.asyncio
MIB = 1 << 20


@pytest.fixture(name="rig")
def a_rig():
    with rig() as made:
        yield made


def peak_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) >> 10


async def test_memory_is_bounded_while_one_client_submits_much_at_once(rig):
    """Six bodies of 40 MiB: they wait in the client, which has them anyway."""
    rig.start()
    body = msgspec.structs.replace(turn(1), raw=b"x" * (40 * MIB))
    async with Client(rig.data, timeout=SOON_S) as client:
        run = await client.run("r", model=rig.model, group_size=64, groups_per_step=8)
        before = peak_mib(rig.pid)
        await asyncio.gather(*(run.submit("g", float(number), turns=[body], key=str(number)) for number in range(6)))
    assert rig.one("SELECT count(*) FROM trajectory") == 6
    assert peak_mib(rig.pid) - before < 300


async def test_a_message_of_many_frames_is_refused_by_the_daemon(rig):
    """Each frame is below the limit, their sum is not."""
    rig.config.write_text(rig.config.read_text().replace("[limits]", "[limits]\nmax_message_mib = 1"))
    rig.start()
    path = paths.socket_path(paths.runtime_dir(rig.data, create=False), paths.CLIENT_SOCKET)
    request = api.Request(id=7, op=api.Submit(run="r", group="g", reward=1.0))
    context = zmq.asyncio.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{path}")
        await socket.send_multipart(Codec(api.Request).encode(request, [bytes(MIB // 2)] * 12))
        assert await socket.poll(1000 * SOON_S)
        reply, _ = Codec(api.Reply).decode(await socket.recv_multipart())
    context.destroy(0)
    assert (reply.id, reply.answer.code) == (7, "too_large") and "max_message_mib" in reply.answer.message
