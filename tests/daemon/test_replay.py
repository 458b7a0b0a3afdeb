"""Expert replay through the whole daemon: routes come in with trajectories, and the trainer gets each batch's bundle."""

from __future__ import annotations

import signal

import pytest
from safetensors.numpy import load_file

from tests.daemon.rig import MIXTURE, fill

pytestmark = pytest.mark.asyncio

ROUTES = bytes([0, 1, 2, 3] + [3, 0, 1, 2] * 4)
"""Five tokens of six, two layers, two experts each."""


def bundles(rig):
    """routes [layers, rows, S, topk] and covered [rows, S] of every batch, by step."""
    rows = rig.rows("SELECT step, replay FROM batch ORDER BY step")
    return {step: load_file(rig.data / "blobs" / sha[:2] / sha) for step, sha in rows}


async def test_the_trainer_gets_the_routes_that_were_submitted(rig):
    rig.configure(MIXTURE)
    rig.start()
    async with rig.run() as (_, run):
        for step in (1, 2):
            await fill(run, step, routes=ROUTES)
            await run.wait(step, timeout=60)
        rows = await run.batches()
        assert [(row["covered"], row["tokens"]) for row in rows] == [(8, 10)] * 2  # two tokens are shared
    assert [mark for mark in rig.script.marks() if mark.startswith("replay:")] == ["replay:1 8", "replay:2 8"]
    for found in bundles(rig).values():
        assert found["covered"].tolist()[0][:11] == [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
        assert found["routes"][:, 0, 0].tolist() == [[0, 1], [2, 3]]
        assert found["routes"][:, 0, 1].tolist() == found["routes"][:, 0, 8].tolist() == [[0, 3], [1, 2]]
        assert (found["routes"][:, 0, 9:] == [0, 1]).all()
    rig.check(4)


async def test_without_expert_replay_there_is_no_bundle(rig):
    rig.configure(MIXTURE)
    rig.start()
    async with rig.run(expert_replay=False) as (_, run):
        await fill(run, 1)
        await run.wait(1, timeout=60)
    assert rig.rows("SELECT replay, covered FROM batch") == [(None, None)]
    assert not [mark for mark in rig.script.marks() if mark.startswith("replay:")]


async def test_the_bundle_survives_a_kill_between_its_files_and_its_row(rig):
    rig.configure(MIXTURE)
    rig.arm("pack.adopted")
    rig.start()
    async with rig.run() as (_, run):
        await fill(run, 1, routes=ROUTES)
        assert rig.died() == -signal.SIGKILL
    rig.assert_nothing_lives()
    assert rig.rows("SELECT * FROM batch") == []
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(1, timeout=60)
    assert [mark for mark in rig.script.marks() if mark.startswith("replay:")] == ["replay:1 8"]
    rig.check(2)
