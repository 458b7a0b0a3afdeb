"""Seeds of the simulated daemon: nothing acknowledged is lost, nothing is trained twice, only committed steps are served.

`QUICK` seeds belong to `make quick`, fifty to `make test`, a thousand to `make test-slow`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .simulation import simulate

QUICK, FAST, ALL = 6, 50, 1000
CHUNK = 50
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(QUICK))
def test_seed(seed: int) -> None:
    simulate(seed)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(QUICK, FAST))
def test_more_seeds(seed: int) -> None:
    simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(FAST, ALL, CHUNK))
def test_every_seed(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_seeds_run_twice_have_the_same_log() -> None:
    """The second time in another process, whose strings hash otherwise."""
    seeds = range(20)
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    again = subprocess.run(
        [sys.executable, "-m", "tests.model.simulation", *map(str, seeds)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        check=True,
    )
    assert "".join(f"{simulate(seed)}\n" for seed in seeds).encode() == again.stdout


def test_a_seed_run_twice_has_the_same_log() -> None:
    assert simulate(3) == simulate(3)
