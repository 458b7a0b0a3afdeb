"""An fsync that failed in another process: the pages it dropped are right in memory and are on no disk."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

from tests.daemon.rig import ROOT

from .history import violations
from .powerloss import NOTHING, Disk, File, Write
from .recording import Told
from .shim import Shim


def run(shim: Shim, root: Path, phase: str) -> str:
    command = [sys.executable, "-m", "tests.crash.dropped", str(root), phase]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | shim.environment(), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_result_whose_fsync_failed_is_not_adopted_out_of_memory(tmp_path: Path) -> None:
    """The next boot finds it whole, commits it and tells everybody; then the power goes off."""
    (tmp_path / "root").mkdir()
    shim = Shim(tmp_path, tmp_path / "root")
    disk = Disk(tmp_path / "root")
    assert run(shim, tmp_path / "root" / "data", "stage") == "5" and shim.victim.endswith("manifest.json")
    before = shim.sequence
    assert run(shim, tmp_path / "root" / "data", "boot") == "1"
    told = [Told(shim.sequence, "step", step) for step in (0, 1)]
    for record in shim.records():
        disk.play(record)
        if record.sequence == before:
            early = copy.deepcopy(disk)
    disk.assert_like(tmp_path / "root", lambda path: "-shm" not in path)
    early.write_image(tmp_path / "early", NOTHING, random.Random(0))
    assert (
        not list((tmp_path / "early").glob("data/tmp/job-*/manifest.json"))
        or not next((tmp_path / "early").glob("data/tmp/job-*/manifest.json")).read_bytes()
    ), "no fsync made it durable"
    disk.write_image(tmp_path / "image", NOTHING, random.Random(0))
    assert not list(violations(tmp_path / "image", told))


def test_what_an_fsync_dropped_no_later_one_makes_durable() -> None:
    file = File()
    file.add(Write(0, b"first"))
    file.sync()
    file.add(Write(5, b" second"))
    file.drop()
    file.add(Write(12, b" third"))
    file.sync()
    assert file.running() == b"first second third" and file.durable == b"first" + bytes(7) + b" third"
    file.add(Write(0, b"first second third"))
    file.sync()
    assert file.durable == b"first second third"
