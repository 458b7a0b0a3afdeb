"""A backup of a running daemon at step 10 while step 11 is trained; the original and the restored folder both go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from artd_client.run import Run
from artd_schema.data.manifest import CheckpointManifest
from tests.daemon.rig import ROOT, Rig, fill

pytestmark = pytest.mark.asyncio
TAKEN, REACHED, AFTER = 10, 11, 12


def command(rig: Rig, module: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"artd.cli.{module}", *words, "--data-dir", str(rig.data)], cwd=ROOT, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


async def train(run: Run, first: int, last: int) -> None:
    for step in range(first, last + 1):
        await fill(run, step)
        assert (await run.wait(step, timeout=60)).step == step


def manifests(data: Path) -> dict[str, CheckpointManifest]:
    """Folder -> manifest of every checkpoint on disk."""
    found = data.glob("checkpoints/r/*/manifest.json")
    return {path.parent.name: msgspec.json.decode(path.read_bytes(), type=CheckpointManifest) for path in found}


async def original(rig: Rig, backup: Path) -> None:
    """Reach step 11, with all checkpoints; at step 10, while the job of step 11 runs, a backup is taken."""
    rig.start()
    async with rig.run(keep_checkpoints=50) as (_, run):
        await train(run, 1, TAKEN)
        rig.script.write(hold__train__11=[])
        await fill(run, TAKEN + 1)
        rig.reached("train:11 1")
        assert "checked" in command(rig, "ctl", "backup", str(backup))
        rig.script.write()
        assert (await run.wait(REACHED, timeout=60)).step == REACHED
    rig.check(2 * REACHED)
    assert rig.stop() == 0


async def test_training_goes_on_after_a_restore(rig: Rig, tmp_path: Path) -> None:
    await original(rig, tmp_path / "backup")
    theirs = manifests(rig.data)
    instance = rig.one("SELECT value FROM meta WHERE key = 'instance'")
    spawns = dict(rig.rows("SELECT name, spawn FROM process"))
    rig.move(rig.root / "restored")
    command(rig, "main", "restore", str(tmp_path / "backup"))
    rig.start()
    async with rig.run(keep_checkpoints=50) as (_, run):
        assert (await run.wait(TAKEN + 1, timeout=60)).step == TAKEN + 1  # on the batch that was under way
        await train(run, TAKEN + 2, AFTER)
    rig.check(2 * AFTER)
    assert all(spawn > spawns[name] + 900 for name, spawn in rig.rows("SELECT name, spawn FROM process"))
    assert rig.one("SELECT value FROM meta WHERE key = 'instance'") != instance
    assert rig.stop() == 0
    ours = manifests(rig.data)
    kept = {name for name, manifest in theirs.items() if manifest.step <= TAKEN}
    assert len(kept) == TAKEN + 1 and ours.keys() & theirs.keys() == kept
    made, later = ({m.step: m for name, m in found.items() if name not in kept} for found in (ours, theirs))
    assert sorted(made) == [11, 12] and sorted(later) == [11]
    assert (made[11].job, made[11].batch, made[11].parent) == (later[11].job, later[11].batch, later[11].parent)
    assert made[12].epoch == made[11].epoch + 1
    assert not {m.epoch for m in made.values()} & {m.epoch for m in theirs.values()}
    assert not {(m.job, m.fence) for m in made.values()} & {(m.job, m.fence) for m in theirs.values()}
    assert {m.instance for m in theirs.values()} == {instance} and instance not in {m.instance for m in made.values()}
