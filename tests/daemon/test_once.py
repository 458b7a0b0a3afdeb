"""Neither lost nor doubled: equal samples of programs that are killed or give up, at a daemon that is killed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from artd_client import ArtdError, Client, turn
from tests.daemon.rig import Rig

SAMPLES = 300
PROGRAM = """
import asyncio, sys
from artd_client import Client, turn

async def main():
    async with Client(sys.argv[1], timeout=60.0) as art:
        run = await art.run("r")
        limit = asyncio.Semaphore(8)

        async def submit(number):
            async with limit:
                await run.submit("g", 1.0, turns=[turn([1], [2], [-1.0])], key=f"p-{number}")
                print(number, flush=True)

        await asyncio.gather(*(submit(number) for number in range(int(sys.argv[2]))))

asyncio.run(main())
"""


def killed_at_random(rig: Rig, dice: random.Random) -> set[int]:
    """Run the program until one of its lives comes to its end; what each life was told is stored."""
    told: set[int] = set()
    for life in range(4):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rig.data), str(SAMPLES)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert program.stdout is not None
        rig.strangers.add(program.pid)
        last = SAMPLES if life == 3 else dice.randrange(5, 60)
        for line in program.stdout:
            told.add(int(line))
            last -= 1
            if last == 0 and life < 3:
                break
            if last == 20 and life % 2:
                rig.kill()
                rig.start()
        program.kill() if life < 3 else None
        told.update(int(line) for line in program.stdout.read().split())
        assert (program.wait() == 0) == (life == 3)
        program.stdout.close()
    return told


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_program_that_is_killed_counts_each_sample_once_by_its_key(rig: Rig, seed: int) -> None:
    rig.start()
    asyncio.run(_make_run(rig))
    told = killed_at_random(rig, random.Random(seed))
    assert told == set(range(SAMPLES))
    keys = [key for (key,) in rig.rows("SELECT key FROM trajectory")]
    assert Counter(keys) == Counter(f"p-{number}" for number in range(SAMPLES))


async def _make_run(rig: Rig) -> None:
    async with rig.run(group_size=100_000):
        pass


@pytest.mark.asyncio
async def test_calls_that_gave_up_are_repeated_by_the_key_of_their_error(rig: Rig) -> None:
    """Each task submits the same body ten times with a time-out that a restart passes, and repeats what may be stored."""
    rig.start()
    body, repeated = [turn([1], [2], [-1.0])], 0

    async def program(data: str) -> None:
        nonlocal repeated
        async with Client(data, timeout=0.25) as art:
            run = await art.run("r")
            for _ in range(10):
                key = None
                while True:
                    try:
                        await run.submit("g", 1.0, turns=body, key=key)
                        break
                    except ArtdError as error:
                        repeated += 1
                        assert error.key == (key or error.key) != ""
                        key = error.key
                        await asyncio.sleep(0.02)
                await asyncio.sleep(0.1)

    async with rig.run(group_size=100_000), asyncio.TaskGroup() as group:
        tasks = [group.create_task(program(str(rig.data))) for _ in range(8)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(rig.kill)
        await asyncio.sleep(0.4)
        await asyncio.to_thread(rig.start)
        await asyncio.gather(*tasks)
    assert repeated and rig.one("SELECT count(*) FROM trajectory") == 80
