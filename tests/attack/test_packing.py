"""Attacks on packing, from outside: its child is stopped, files go away and come back, a bit of an acknowledged body is flipped."""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest

from artd.cli import ctl
from artd_schema.data.trajectory import Turn
from tests.daemon.rig import fill

pytestmark = pytest.mark.asyncio


async def artctl(rig, capsys, *words):
    code = await asyncio.to_thread(ctl.main, [*words, "--data-dir", str(rig.data)])
    return code, capsys.readouterr().out


async def large(run, step):
    """A group whose bodies lie in files."""
    columns = {
        "prompt_ids": array("i", [5, 6, 7]).tobytes(), "token_ids": array("i", [1, 2]).tobytes(),
        "logprobs": array("f", [-1, -2]).tobytes(),
    }  # fmt: skip
    for number in range(2):
        turn = Turn(**columns, raw=bytes([step, number]) * 40_000)
        await run.submit(f"s{step}", float(number), turns=[turn], key=f"s{step}-{number}")


def blob(rig, key):
    sha = rig.one("SELECT blob FROM trajectory WHERE key = ?", key)
    return rig.data / "blobs" / sha[:2] / sha


async def test_a_packer_that_is_stopped_is_ended_and_the_step_is_trained(rig):
    text = rig.config.read_text()
    rig.config.write_text(text.replace("[limits]\n", "[limits]\nstall_s = 2.5\n"))
    rig.points.mkdir()
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        rig.arm("pack.written", action="stop")
        await fill(run, 1)
        assert (await run.wait(1, timeout=60)).step == 1
        assert rig.taken("pack.written")
    rig.check(2)


async def test_what_cannot_be_read_or_is_damaged_is_never_discarded_by_itself(rig, capsys):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await run.pause()
        await large(run, 1)
        file, away = blob(rig, "s1-1"), rig.root / "away"
        file.rename(away)
        await run.resume()
        rig.until(lambda: rig.rows("SELECT 1 FROM event WHERE kind = 'batch.failed'"), "a batch that failed")
        away.rename(file)
        assert (await run.wait(1, timeout=60)).step == 1

        await run.pause()
        await large(run, 2)
        file = blob(rig, "s2-0")
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 4]))
        await run.resume()
        rig.until(lambda: rig.one("SELECT state FROM run") == "paused", "the pause")
        code, told = await artctl(rig, capsys, "status", "--json")
        problem = json.loads(told)["problems"][0]
        assert code == 4 and "group 's2' cannot be packed: trajectory 3: the file" in problem["what"]
        assert str(file) in problem["what"] and "artctl discard-group r s2" in problem["next"]
        file.write_bytes(good)
        assert (await artctl(rig, capsys, "resume", "r"))[0] == 0
        assert (await run.wait(2, timeout=60)).step == 2

        await large(run, 3)
        await run.wait(3, timeout=60)
        assert (await artctl(rig, capsys, "discard-group", "r", "s3"))[0] == 6
        assert (await artctl(rig, capsys, "discard-group", "r", "none"))[0] == 5
        await run.submit("open", 1.0, turns=[Turn(prompt_ids=bytes(4), token_ids=bytes(4), logprobs=bytes(4))])
        assert (await artctl(rig, capsys, "discard-group", "r", "open"))[0] == 0
        assert {row["name"] for row in await run.groups(["discarded"])} == {"open"}
    rig.check(7)
