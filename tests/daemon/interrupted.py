"""The demo's skeleton with fake workers: `python -m tests.daemon.interrupted PHASE DATA_DIR MODEL`.

It prints its phase, so that a test can interrupt it there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo

from artd_client import Client, turn

SPEC = {"group_size": 2, "groups_per_step": 1, "row_length": 64, "drop_longer": True}


def say(phase: str) -> None:
    print(f"phase {phase}", flush=True)


async def main(args: argparse.Namespace) -> int:
    async with demo.daemon(args) as data_dir, Client(data_dir=data_dir) as art:
        say("engine")
        run = await art.run("r", model=args.model, **SPEC)
        await run.wait(0)
        say("rollouts")
        if args.phase == "rollouts":
            await asyncio.Event().wait()
        for reward in (0.0, 1.0):
            await run.submit("g", reward, turns=[turn([1, 2, 3], [4, 5], [-1.0, -1.0])])
        say("training")
        await run.wait(1)
        say("report")
        time.sleep(2.0)  # the report itself does not yield
        await asyncio.sleep(30.0)
    return 0


if __name__ == "__main__":
    phase, data_dir, model = sys.argv[1:]
    sys.exit(demo.guard(main, argparse.Namespace(phase=phase, data_dir=data_dir, model=model)))
