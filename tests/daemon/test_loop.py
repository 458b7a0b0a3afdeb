"""The whole loop with fake workers: create, init, submit, pack, train, commit, push, wait."""

from __future__ import annotations

import pytest

from tests.daemon.rig import fill

pytestmark = pytest.mark.asyncio


async def test_three_steps(rig):
    rig.start()
    async with rig.run() as (client, run):
        assert (await run.wait(0, timeout=60)).step == 0
        for step in range(1, 4):
            await fill(run, step)
            info = await run.wait(step, timeout=60)
            assert info.metrics["loss"] == 0.5 and info.metrics["trained_trajectories"] == 2
            assert {"pack", "train", "commit"} <= info.seconds.keys()
        await run.refresh()
        assert (run.step, run.served, run.state) == (3, 3, "active")
        assert [row["state"] for row in await run.pushes()] == ["live"] + ["superseded"] * 3
        assert {row["state"] for row in await client.workers()} == {"ready"}
    rig.check(6)
    assert rig.stop() == 0
    assert rig.one("SELECT value FROM meta WHERE key = 'clean'") == "1"
