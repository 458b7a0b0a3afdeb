"""Values from outside against a whole daemon: whatever a client can send, or a row can hold, it lives and so do the other runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sqlite3
from pathlib import Path

import msgspec
import pytest

from artd.cli import ctl
from artd_client import Client, Failed, Invalid
from artd_schema.run.spec import RunSpec
from tests.daemon.rig import SPEC, fill, rig

pytestmark = pytest.mark.asyncio


@pytest.fixture(name="rig")
def a_rig():
    with rig() as made:
        yield made


def statement(made, sql, *values):
    """Change the database of a daemon that is down."""
    with contextlib.closing(sqlite3.connect(made.data / "artd.db")) as c:
        c.execute(sql, values)
        c.commit()


async def status(made, capsys):
    code = await asyncio.to_thread(ctl.main, ["status", "--json", "--data-dir", str(made.data)])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
async def test_a_spec_with_a_number_that_json_cannot_hold_is_refused_and_the_daemon_lives(rig):
    rig.start()
    async with Client(rig.data, timeout=30.0) as client:
        spec = RunSpec(model=rig.model, group_timeout_s=math.inf)
        with pytest.raises(Invalid, match="group_timeout_s"):
            await client.run("r", spec=spec)
        with pytest.raises(Invalid, match="groups_per_step"):
            await client.run("r", spec=msgspec.structs.replace(spec, group_timeout_s=1.0, groups_per_step=2**63))
        assert await client.runs() == []
    rig.stop()
    rig.start()


@pytest.mark.slow
async def test_a_boot_on_a_spec_that_cannot_be_read_serves_everything_else(rig, capsys):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
    rig.stop()
    statement(rig, "UPDATE run SET spec = CAST(json_set(CAST(spec AS TEXT), '$.group_timeout_s', NULL) AS BLOB)")
    rig.start()
    code, told = await status(rig, capsys)
    assert code == 4 and told["run"]["state"] == "paused"
    assert "the spec of run 'r' cannot be read: Expected `float`, got `null`" in told["problems"][0]["what"]
    assert "artctl finish r" in told["next"]
    async with Client(rig.data, timeout=30.0) as client:
        assert [row["state"] for row in await client.runs()] == ["paused"]
        with pytest.raises(Failed, match="cannot be read"):
            await client.run("r", model=rig.model, **SPEC)
        with pytest.raises(Failed, match="is paused: the spec of run 'r' cannot be read"):
            _ = (await client.run("r")).spec
    assert await asyncio.to_thread(ctl.main, ["finish", "r", "--data-dir", str(rig.data)]) == 0
    async with Client(rig.data, timeout=30.0) as client:
        other = await client.run("other", model=rig.model, **SPEC)
        await fill(other, 1)
        assert (await other.wait(1, timeout=60)).step == 1
    assert rig.rows("SELECT state FROM run ORDER BY id") == [("finished",), ("active",)]
    # The rig proves every invariant at its end: this row is damaged on purpose.
    rig.process.kill()
    rig.process.wait()
    statement(rig, "UPDATE run SET spec = (SELECT spec FROM run WHERE name = 'other')")


async def test_an_altered_base_model_starts_no_worker_and_the_old_one_goes_on(rig, capsys):
    rig.start()
    async with rig.run() as (_, run):
        await run.wait(0, timeout=60)
        weights = Path(rig.model) / "model.safetensors"
        kept, stat = weights.read_bytes(), weights.stat()
        weights.write_bytes(b"NO WEIGHTS")
        pid = rig.worker_pid("trainer")
        os.kill(pid, signal.SIGKILL)
        rig.until(
            lambda: rig.rows(
                "SELECT 1 FROM process WHERE kind = 'trainer' AND state = 'stopped' AND error LIKE '%changed since%'"
            ),
            "the refusal",
        )
        await fill(run, 1)
        code, told = await status(rig, capsys)
        assert code == 4 and "trainer cannot start: base model file" in told["problems"][0]["what"]
        spawn = rig.one("SELECT spawn FROM process WHERE kind = 'trainer'")
        await asyncio.sleep(1.0)
        assert rig.rows("SELECT spawn, state FROM process WHERE kind = 'trainer'") == [(spawn, "stopped")]
        weights.write_bytes(kept)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (await run.wait(1, timeout=60)).step == 1
    rig.check(2)
