"""How fast everything is back: `python -m tests.bench.recovery [--json] [--trajectories N] [--jobs N]`.

A data folder of N trajectories of 4 KiB and their train jobs (the one of `tests.bench.check`), a real daemon with scripted
workers. Ready: the first submit that a client, which was connected before the kill, gets acknowledged after it; the new
daemon is started at the moment of the kill. Re-dispatched: a train job's next fence at the trainer, less what starting that
process took. Goals: 1.5 s and 1 s.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

from artd.models.base_model import pin
from artd_client import Client
from artd_client.run import Run
from artd_schema.run.spec import RunSpec
from tests.bench.check import BODY, World
from tests.bench.report import Report, parser
from tests.daemon.rig import SPEC, Rig, fill, turn
from tests.daemon.rig import rig as new_rig

ROUNDS = 7
DISPATCH_ROUNDS = 5
READY_S, DISPATCH_S = 1.5, 1.0


async def first_acknowledged(run: Run, numbers: itertools.count[int]) -> float:
    """Seconds until a submit is acknowledged."""
    started, number = time.perf_counter(), next(numbers)
    await run.submit(f"after-{number}", 0.0, turns=[turn(number)], key=f"after-{number}")
    return time.perf_counter() - started


async def daemon_kills(rig: Rig, rounds: int) -> list[float]:
    """Seconds from kill -9 to ready, each round."""
    numbers, found = itertools.count(), []
    async with Client(rig.data, timeout=60.0) as client:
        run = await client.run("r")
        await first_acknowledged(run, numbers)
        for _ in range(rounds):
            await asyncio.sleep(1.0)  # the workers are up again
            assert rig.process is not None
            rig.process.kill()
            rig.start(wait=False)
            found.append(await first_acknowledged(run, numbers))
            await asyncio.to_thread(rig.until, lambda: rig.state() == "ready", "the daemon to be ready")
    return found


async def trainer_kill() -> tuple[float, float]:
    """A training trainer is killed: (seconds until its job is at the next process, of which that process's start)."""
    with new_rig() as rig:
        rig.start()
        rig.script.write(hold__train__1=[1])
        async with rig.run() as (_, run):
            await run.wait(0, timeout=30)
            await fill(run, 1)
            rig.reached("train:1 1")
            (spawn,) = rig.rows("SELECT spawn FROM process WHERE kind = 'trainer'")[0]
            victim, killed = rig.worker_pid("trainer"), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            up = reached(
                lambda: rig.rows("SELECT 1 FROM process WHERE kind = 'trainer' AND spawn > ? AND pid > 0", spawn)
            )
            started = reached(lambda: f"started {spawn + 1}" in rig.script.marks())
            given = reached(lambda: "train:1 2" in rig.script.marks())
            rig.script.write()
            await run.wait(1, timeout=30)
        rig.stop()
    return given - killed, started - up


def reached(condition: Callable[[], object]) -> float:
    """When the condition came true, to a few milliseconds."""
    while not condition():
        time.sleep(0.002)
    return time.monotonic()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trajectories", type=int, default=100_000)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    args = options.parse_args()
    report = Report(f"recovery with {args.trajectories} trajectories of {BODY} bytes and {args.jobs} jobs")
    with new_rig() as rig:
        world = World(rig.data, args.trajectories, args.jobs, RunSpec(model=rig.model, **SPEC), pin(rig.model))
        world.fill()
        rig.start()
        seconds = asyncio.run(daemon_kills(rig, args.rounds))
        report.add("kill -9 of the daemon to ready, median", statistics.median(seconds), "s", READY_S, "<=")
        report.add("  worst", max(seconds), "s")
        report.add("  database", (rig.data / "artd.db").stat().st_size / 2**20, "MiB")
        rig.kill()
    kills = [asyncio.run(trainer_kill()) for _ in range(DISPATCH_ROUNDS)]
    rest = [whole - start for whole, start in kills]
    report.add(
        "kill -9 of the trainer to its job's next fence, less a start", statistics.median(rest), "s", DISPATCH_S, "<="
    )
    report.add("  a start of the scripted trainer", statistics.median(start for _, start in kills), "s")
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
