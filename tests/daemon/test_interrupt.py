"""Ctrl-C in every phase of a program that trains: exit 130 soon, nothing behind, and the next start works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.awake import SOON_S, Awake
from tests.daemon.rig import ROOT, Rig
from tests.fakes.script import VARIABLE

HOLDS = {"engine": "push:0", "training": "train:1", "push": "push:1"}
MARKS = {"engine": "push:0 1", "training": "train:1 1", "push": "push:1 2"}


@pytest.mark.parametrize("phase", ["start", "engine", "rollouts", "training", "push", "report"])
def test_sigint_ends_everything_with_130(rig: Rig, phase: str) -> None:
    if phase in HOLDS:
        rig.script.write(**{f"hold:{HOLDS[phase]}": []})
    env = os.environ | {VARIABLE: str(rig.script.path), "ARTD_CONFIG": str(rig.config)}
    command = [sys.executable, "-m", "tests.daemon.interrupted", phase, str(rig.data), rig.model]
    with (rig.root / "out").open("w+") as out:
        program = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
        wanted = {"start": "starting the daemon", "rollouts": "phase rollouts", "report": "phase report"}.get(phase, "")
        rig.until(lambda: wanted in (rig.root / "out").read_text(), f"phase {phase}")
        if phase in MARKS:
            rig.reached(MARKS[phase])
        os.killpg(program.pid, signal.SIGINT)
        with Awake() as took:
            code = program.wait(SOON_S)
    assert (code, took.seconds < 20) == (130, True), (rig.root / "out").read_text()
    rig.assert_nothing_lives()
    rig.script.write()
    rig.start()
    assert rig.stop() == 0
