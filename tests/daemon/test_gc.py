"""A daemon whose contents have a short life: what went is gone from rows and disk, what is needed is there, and it trains on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from artd.store.blobs import TRASH
from tests.daemon.rig import ROOT, Rig, fill

pytestmark = pytest.mark.asyncio
SHORT = "[retention]\ntrajectories_days = 1e-7\nbatches_days = 1e-7\nexchanges_days = 1e-7\n"


def artctl(rig: Rig, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "artd.cli.ctl", *words, "--json", "--data-dir", str(rig.data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return dict(json.loads(done.stdout))


def counts(rows: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    return {(row["what"], row["kind"]): row["count"] for row in rows}


@pytest.mark.slow
async def test_short_lives(rig: Rig) -> None:
    rig.config.write_text(rig.config.read_text() + SHORT)
    rig.start()
    async with rig.run(keep_checkpoints=1) as (client, run):
        for step in (1, 2, 3):
            await fill(run, step)
            await run.wait(step)
        await fill(run, 4)  # queued while the collection runs
        rig.until(
            lambda: rig.one("SELECT count(*) FROM checkpoint WHERE state = 'retired'") >= 2, "retired checkpoints"
        )
        trash = rig.data / "blobs" / TRASH
        would, done = artctl(rig, "gc", "--dry-run"), artctl(rig, "gc")
        assert would["stopped"] == "" and counts(done["rows"])["expired", "trajectory"] >= 6
        assert counts(done["rows"])["expired", "batch"] >= 1
        await run.wait(4)
        await client.collect()
        assert not trash.exists()  # what was put less than ten minutes ago stays, with a row or without
    rig.restart()
    async with rig.run(keep_checkpoints=1) as (_, run):
        await fill(run, 5)
        await run.wait(5)
    rig.stop()
    assert rig.one("SELECT count(*) FROM trajectory") == 10
    assert rig.one("SELECT count(*) FROM trajectory WHERE payload = 'expired' AND state <> 'trained'") == 0
    artctl(rig, "gc")  # down: after the grace of a boot, files without rows go at once
    assert list(trash.iterdir())
    artctl(rig, "gc")
    assert not list(trash.iterdir())
    files = {path.name for path in (rig.data / "blobs").glob("*/*")}
    assert files == {row[0] for row in rig.rows("SELECT sha FROM blob")}
