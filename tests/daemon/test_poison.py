"""What stops a run by itself, how `artctl` tells of it, and every way back: retry, discard, cancel, rollback."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from artd.cli import ctl
from artd_client import Conflict, Failed, NotFound
from tests.daemon.rig import fill

pytestmark = pytest.mark.asyncio
STALL_S = 6.0


@pytest.fixture(name="artctl")
def an_artctl(rig, capsys):
    """`await artctl("status")`: its JSON document; steering verbs give None."""

    async def call(*words):
        looking = words[0] in ("status", "job", "jobs", "checkpoints")
        told = [*words, *(["--json"] if looking else []), "--data-dir", str(rig.data)]
        code = await asyncio.to_thread(ctl.main, told)
        out = capsys.readouterr()
        assert code in (0, 4), out.err
        return json.loads(out.out) if looking else None

    return call


async def quarantined(rig, run, **faults):
    """Step 1 goes wrong by these faults until its job is quarantined."""
    rig.script.write(**faults)
    await run.wait(0, timeout=60)
    await fill(run, 1)
    with pytest.raises(Failed, match="is paused: job 2 is quarantined"):
        await run.wait(1, timeout=60)


async def test_a_batch_that_kills_its_trainer_twice_is_told_with_its_evidence_and_discarded(rig, artctl):
    rig.start()
    async with rig.run() as (_, run):
        await quarantined(rig, run, die__1=[1, 2])
        status = await artctl("status")
        problem = status["problems"][0]
        assert status["health"] == "degraded" and "job 2 is quarantined: killed by SIGKILL" in problem["what"]
        assert problem["next"] == status["next"] == f"artctl retry 2 --data-dir {rig.data}"
        assert [row["next"] for row in (await artctl("jobs"))["jobs"]] == [status["next"], ""]
        told = await artctl("job", "2")
        assert told["job"]["deaths"] == 2 and [choice["command"].split()[1] for choice in told["choices"]] == [
            "retry", "discard", "cancel"
        ]  # fmt: skip
        for fence, attempt in enumerate(told["attempts"], 1):
            assert attempt["outcome"] == "died" and "killed by SIGKILL" in attempt["error"]
            assert attempt["evidence"] == f"last words of fence {fence}"
        assert [row["key"] for row in told["trajectories"]] == ["s1-g0-0", "s1-g0-1"]
        await artctl("discard", "2")
        assert {row["state"] for row in await run.trajectories()} == {"discarded"}
        assert (await run.refresh()).state == "active"
        rig.script.write()
        await fill(run, 2)
        assert (await run.wait(1, timeout=60)).step == 1
        assert (await artctl("status"))["problems"] == []
    rig.check(4)
    assert rig.rows("SELECT key FROM trajectory WHERE state = 'trained' ORDER BY id") == [("s2-g0-0",), ("s2-g0-1",)]


async def test_a_job_that_hangs_while_its_trainers_heart_beats_is_tried_again(rig, artctl):
    """The second attempt takes longer than what the first one was given, and goes on."""
    text = rig.config.read_text()
    rig.config.write_text(text.replace("[limits]\n", f"[limits]\nstall_s = {STALL_S}\n"))
    rig.script.write(hold__train__1=[1])
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("train:1 1")
        hung = rig.worker_pid("trainer")
        rig.script.write(hold__train__1=[1], train_s=1.5 * STALL_S)
        assert (await run.wait(1, timeout=60)).step == 1
        assert not Path(f"/proc/{hung}").exists()
        told = await artctl("job", "2")
        assert (told["job"]["state"], told["job"]["attempts"], told["job"]["deaths"]) == ("succeeded", 1, 0)
        first, second = told["attempts"]
        assert (first["outcome"], second["outcome"]) == ("transient", "succeeded") and second["spawn"] > first["spawn"]
        why = r"job 2 \(train, step 1\) made no progress for \d+ s \(limits.stall_s\); killed by SIGKILL"
        assert re.match(why, first["error"])
        assert "tests/fakes/script.py" in first["evidence"], "where it hung"
    rig.check(2)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "verb"), [("refuse__1", "discard"), ("damage__1", "retry")])
async def test_a_loss_that_is_not_finite_and_a_result_with_another_hash_stop_the_run(rig, artctl, fault, verb):
    """The trainer's own word about the numbers will be the same again; a damaged file may come right."""
    rig.start()
    async with rig.run() as (_, run):
        await quarantined(rig, run, **{fault: [1]})
        assert (await artctl("status"))["next"] == f"artctl {verb} 2 --data-dir {rig.data}"
        await artctl("retry", "2")
        assert (await run.wait(1, timeout=60)).step == 1
    rig.check(2)


@pytest.mark.slow  # tests/unit/test_jobs.py has the late results, tests/crash the kills at every point
@pytest.mark.parametrize("point", ["job.claimed", "result.verified", "result.published", "result.committed"])
async def test_a_retry_that_is_interrupted_trains_nothing_twice(rig, point):
    rig.points.mkdir()
    rig.start()
    async with rig.run() as (client, run):
        await quarantined(rig, run, die__1=[1, 2])
        rig.arm(point)
        await client.retry(2)
        rig.died()
        rig.assert_nothing_lives()
        rig.start()
        await run.wait(1, timeout=60)
    rig.check(2)
    assert rig.one("SELECT min(fence) FROM attempt WHERE outcome = 'succeeded' AND job_id = 2") > 2
    assert rig.one("SELECT deaths FROM job WHERE id = 2") == 0, "an ordered end was counted"


async def test_a_run_goes_on_from_an_older_step_in_a_new_lineage(rig, artctl):
    rig.start()
    async with rig.run() as (client, run):
        for step in (1, 2, 3):
            await fill(run, step)
            await run.wait(step, timeout=60)
        epoch = rig.one("SELECT max(epoch) FROM checkpoint")
        await run.pause()
        await fill(run, 4)
        with pytest.raises(NotFound, match=r"no checkpoint r@9; it can be rolled back to @0, @1, @2"):
            await run.rollback(9)
        with pytest.raises(Conflict, match="r@3 is the newest step already"):
            await run.rollback(3)
        await artctl("rollback", "r@1")
        await run.wait(1, timeout=60)
        assert (run.step, (await run.refresh()).info.lineage) == (3, 1) and (run.step, run.served) == (1, 1)
        engine = next(row for row in await client.workers() if row["kind"] == "engine")
        assert (engine["spawn"], engine["restarts"]) == (1, 0), "the engine was restarted for a rollback"
        rig.restart()
        await run.resume()
        assert (await run.wait(2, timeout=60)).step == 2
        rows = {(row["lineage"], row["step"]): row for row in (await artctl("checkpoints"))["checkpoints"]}
        assert [key for key, row in sorted(rows.items()) if not row["abandoned"]] == [(0, 0), (0, 1), (1, 2)]
        assert "/l1-s000002-" in rows[1, 2]["dir"] and rows[1, 2]["parent_step"] == 1
        assert rows[1, 2]["epoch"] > epoch, "a policy epoch was used twice"
        rig.until(
            lambda: rig.one("SELECT count(*) FROM checkpoint WHERE state = 'retired'") == 2, "the left steps to go"
        )
    assert rig.one("SELECT count(*) FROM trajectory WHERE state = 'trained'") == 8, "each once, in whichever lineage"
    rig.assert_whole()


@pytest.mark.slow
async def test_a_push_that_fails_again_and_again_pauses_the_run_until_it_is_resumed(rig, artctl):
    rig.script.write(bad__0=[])
    rig.start()
    async with rig.run() as (_, run):
        rig.until(lambda: rig.rows("SELECT 1 FROM run WHERE state = 'paused'"), "the pause", 60.0)
        status = await artctl("status")
        assert status["next"].endswith(f"artctl resume r --data-dir {rig.data}"), status["problems"]
        assert any("push 1 failed 5 times: verify: told to fail" in problem["what"] for problem in status["problems"])
        rig.script.write()
        await artctl("resume", "r")
        assert (await run.wait(0, timeout=60)).step == 0
    assert rig.rows("SELECT state, attempts FROM push WHERE id = 1") == [("failed", 5)]
