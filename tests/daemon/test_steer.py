"""What an operator does: stall, flush, pause, resume, finish, a second run, a second daemon, signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from artd_client import Client, Conflict, Failed, Invalid, Stalled
from tests.awake import Awake
from tests.daemon.rig import ROOT, SPEC, fill

pytestmark = pytest.mark.asyncio


async def test_stalled_then_flushed(rig):
    rig.start()
    async with rig.run(groups_per_step=3) as (_, run):
        await run.wait(0, timeout=60)
        with pytest.raises(Stalled) as caught:
            await run.wait(1, timeout=60)
        assert (caught.value.trainable, caught.value.needed) == (0, 3)
        await fill(run, 1, groups=2)
        with pytest.raises(Stalled) as caught:
            await run.wait(1, timeout=60)
        assert (caught.value.sealed, caught.value.needed) == (2, 3)
        await run.flush()
        assert (await run.wait(1, timeout=60)).step == 1
        await run.flush()  # nothing to flush is no error and leaves nothing behind
        rig.until(lambda: rig.one("SELECT flush FROM run") == 0, "the flush to end")
        with pytest.raises(Stalled):
            await run.wait(2, timeout=60)
    rig.check(4)


async def test_paused_trains_nothing_and_goes_on_when_resumed(rig):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await run.pause("lunch")
        await fill(run, 1)
        await run.flush()
        with pytest.raises(Failed, match="is paused: lunch"):
            await run.wait(1, timeout=60)
        time.sleep(0.3)
        assert rig.one("SELECT count(*) FROM batch") == 0
        await run.resume()
        await run.wait(1, timeout=60)
    rig.check(2)


async def test_what_a_run_learns_with_changes_while_it_goes_on(rig):
    """From the next batch on, across a kill -9; a program that knows nothing of the change attaches as before."""
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        await run.wait(1, timeout=60)
        await run.update(optimizer={"lr": 0.5})
        assert (run.spec.optimizer.lr, run.learning.optimizer.lr) == (1e-5, 0.5)
        rig.restart()
        await fill(run, 2)
        await run.wait(2, timeout=60)
        with pytest.raises(Invalid, match=r"loss\.kind stays as the run was made"):
            await run.update(loss={"kind": "ppo"})
    async with rig.run() as (_, again):
        assert again.learning.version == 1
    rates = "SELECT json_extract(learning, '$.optimizer.lr') FROM job WHERE kind = 'train' ORDER BY id"
    assert rig.rows(rates) == [(1e-5,), (0.5,)]
    rig.check(4)


async def test_finish_ends_the_workers_and_the_next_run_gets_its_own(rig):
    rig.start()
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        with pytest.raises(Conflict, match="run 'r' is active"):
            await client.run("second", model=rig.model, **SPEC)
        await run.finish()
        second = await client.run("second", model=rig.model, **SPEC)  # at once, while the first one's workers live
        assert (await second.wait(0, timeout=60)).run == "second"
        assert rig.rows("SELECT name FROM serving WHERE state = 'live'") == [("second@0",)]
        with pytest.raises(Conflict, match="finished"):
            await run.resume()
        await second.finish()
        rig.until(
            lambda: rig.one("SELECT count(*) FROM process WHERE state = 'stopped'") == 4,
            "the workers of both runs stopped",
        )
        assert len(rig.living()) == 3, rig.living()  # the daemon, the gateway and its guardian


async def test_a_restart_goes_on_with_the_active_run(rig):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
    assert rig.stop() == 0
    rig.start()
    rig.until(lambda: rig.rows("SELECT 1 FROM serving WHERE state = 'live'"), "the run to be served again")
    assert rig.one("SELECT value FROM meta WHERE key = 'boot'") == "2"
    rig.check(0)


async def test_a_second_daemon_is_refused_by_name(rig):
    rig.start()
    command = [sys.executable, "-m", "artd.cli.main", "start", "--data-dir", rig.data, "--config", rig.config]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, text=True)
    assert done.returncode == 6 and f"pid {rig.process.pid}" in done.stderr and str(rig.data) in done.stderr
    async with Client(rig.data) as client:
        assert await client.runs() == []


async def test_sigterm_in_the_middle_of_a_step_ends_everything_and_loses_nothing(rig):
    rig.start()
    rig.script.write(hold__train__1=[1])
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("train:1 1")
    with Awake() as took:
        assert rig.stop() == 0
    assert took.seconds < 20, "drain_s is 5"
    assert rig.rows("SELECT state, attempts FROM job WHERE kind = 'train'") == [("queued", 0)]
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(1, timeout=60)
    rig.check(2)


async def test_a_second_signal_forces_the_end(rig):
    rig.config.write_text(rig.config.read_text().replace("drain_s = 5.0", "drain_s = 600.0"))
    rig.start()
    rig.script.write(hold__train__1=[1])
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        await fill(run, 1)
        rig.reached("train:1 1")
    rig.process.send_signal(signal.SIGINT)
    rig.until(lambda: rig.state() == "draining", "draining")
    rig.process.send_signal(signal.SIGINT)
    assert rig.died() == 130
    rig.assert_nothing_lives()


async def test_bad_input_gets_an_answer(rig):
    rig.start()
    async with Client(rig.data) as client:
        for fields, name in [({"group_size": 0}, "group_size"), ({"lora": {"rank": -1}}, "rank")]:
            with pytest.raises(Invalid, match=name):
                await client.run("r", model=rig.model, **fields)
        with pytest.raises(Invalid, match="no model folder"):
            await client.run("r", model="/nowhere")
        assert await client.runs() == []


async def test_a_base_model_that_changed_is_not_trained(rig):
    """The pinned sha256 manifest is compared at every start; the error says which file."""
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
    rig.kill()
    (Path(rig.model) / "model.safetensors").write_bytes(b"other weights")
    rig.start()
    error = "SELECT error FROM process WHERE kind = 'trainer'"
    rig.until(lambda: "model.safetensors changed" in rig.one(error), "the refusal")
    assert rig.one("SELECT state FROM process WHERE kind = 'trainer'") == "stopped"


async def test_a_clean_stop_in_the_middle_of_a_push_is_no_failure_of_it(rig):
    rig.script.write(**{"hold:push:0": []})
    rig.start()
    async with rig.run():
        rig.reached("push:0 1")
    assert rig.stop() == 0
    assert rig.rows("SELECT state, attempts FROM push") == [("prepared", 0)]
