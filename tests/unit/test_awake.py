"""awake: what a bound of a test is held against."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.awake import Awake, until

ROOT = Path(__file__).parents[2]
CHILD = """
import sys, time
from tests.awake import Awake
with Awake() as passed:
    while not passed.seconds:
        time.sleep(0.01)
    print("up", flush=True)
    sys.stdin.readline()
    print(passed.seconds)
"""


def test_time_passes_beside_a_call_that_blocks() -> None:
    began = time.monotonic()
    with Awake() as passed:
        while passed.seconds < 0.2:
            time.sleep(0.01)
    assert time.monotonic() - began >= 0.2
    before = passed.seconds
    time.sleep(0.1)
    assert passed.seconds == before, "it is over"


def test_a_standstill_does_not_count() -> None:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout and child.stdout.readline() == "up\n"
        began = time.monotonic()
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        seconds = float(child.stdout.readline())
        assert 0 < seconds < time.monotonic() - began - 1.5


@pytest.mark.asyncio
async def test_a_condition_may_be_awaitable() -> None:
    looks = []

    async def third() -> bool:
        looks.append(1)
        return len(looks) == 3

    await until(third)
    await until(lambda: looks)
    assert len(looks) == 3
