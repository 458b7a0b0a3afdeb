"""SIGKILL at every crash point: nothing lost, nothing trained twice, steps contiguous, only committed weights served.

A life is what is armed while one step is made: whoever reaches its points dies there, and a daemon that died is started again
until all of them were reached and the step is served. A second death of a worker under one daemon has a back-off, and a second
death over one job quarantines it, so that a life holds at most one point of each worker.
"""

from __future__ import annotations

import pytest

from artd_schema.crashpoint import RECOVERY
from tests.crash.loop import running
from tests.daemon.rig import Rig, rig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600)]  # 15 s each when the machine is idle

CHAINS: dict[str, tuple[tuple[str, ...], ...]] = {
    "in": (
        ("schema.created", "run.created", "spawn.started", "reap.done", "recover.adopted", "recover.interrupted",
         "engine.pausing"),
        ("submit.inserted", "submit.committed", "exchange.committed", "file.written",
         "gateway.generated", "train.accepted", "engine.started"),
        ("file.renamed", "writer.commit", "writer.committed", "gateway.recorded", "train.stepped", "engine.fenced"),
        ("delivery.committed", "gateway.ended", "refer.committed"),
        ("pack.requested", "pack.adopted", "publish.renamed", "pack.committed", "stage.files", "engine.paused"),
    ),
    "out": (
        ("job.claimed", "result.verified", "result.published", "result.committed",
         "gateway.held", "stage.manifest", "engine.updated"),
        ("push.claimed", "push.held", "push.live", "push.served", "train.committed", "engine.resumed"),
        ("pack.written", "job.failed", "client.sent", "engine.verified"),
        ("retain.retired", "recover.removed", "wal.checkpoint", "gc.trashed", "gc.unlinked", "stop.drained"),
    ),
}  # fmt: skip


@pytest.fixture(name="rig")
def a_rig():
    with rig() as made:
        yield made


@pytest.mark.parametrize("chain", CHAINS)
async def test_killed_at_every_point(rig: Rig, chain: str):
    async with running(rig) as loop:
        for points in CHAINS[chain]:
            await loop.survive(points)


async def test_promises_are_given_after_what_they_promise(rig: Rig):
    """A trainer hears of a commit after it; a step is served after its engine's Live."""
    async with running(rig) as loop:
        await loop.told_early()
        await loop.served_early()


@pytest.mark.slow
@pytest.mark.parametrize("again", RECOVERY)
@pytest.mark.parametrize("chain", CHAINS)
async def test_killed_again_while_it_recovers(rig: Rig, chain: str, again: str):
    async with running(rig) as loop:
        for points in CHAINS[chain]:
            await loop.survive(points, again)
