"""`simulate(seed)`: one seed of the simulated world, from an empty folder to its log.

Owner of: the folder, the loop, and what is exchanged for the world's in the modules of artd: threads, processes, chance and
crash points, nothing else. `python -m tests.model.simulation SEED...` runs seeds and prints their logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import anyio.to_thread

from artd import recover, workforce
from artd.packing import service
from artd.supervise import worker as supervised
from artd.supervise.supervisor import Supervisor

from .virtual import InlineThreads, VirtualLoop
from .world import World

SHELF = Path("/dev/shm")


@contextlib.contextmanager
def patched(world: World) -> Iterator[None]:
    """What the services reach for outside themselves is the world's."""
    names = SimpleNamespace(uuid4=lambda: uuid.UUID(int=world.rng.getrandbits(128)))
    supervisor = functools.partial(Supervisor, uniform=world.rng.random)
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("artd.") and hasattr(module, "reach"):
                stack.enter_context(mock.patch.object(module, "reach", world.reach))
        for owner, name, value in (
            (anyio.to_thread, "run_sync", InlineThreads(world.rng).run_sync),
            (supervised, "spawn", world.spawn),
            (service, "run_child", world.pack),
            (workforce, "Supervisor", supervisor),
            (recover, "uuid", names),
            (os, "fsync", lambda _: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def simulate(seed: int) -> str:
    """Run one seed; its log. Raises AssertionError with what broke, the end of the log and how to run the seed again."""
    lines: list[str] = []

    async def main(root: Path) -> list[str]:
        world = World(seed, root)
        nonlocal lines
        lines = world.lines
        with patched(world):
            await world.run()
        if not world.history.problems:
            world.audit()
        return world.history.problems

    root = Path(tempfile.mkdtemp(prefix="artd-sim.", dir=SHELF if SHELF.is_dir() else None))
    logging.disable(logging.CRITICAL)
    gc.disable()  # what a dead daemon left behind is dropped at no other moment than in the run before
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            problems = runner.run(main(root))
    except Exception as error:
        problems = ["".join(traceback.format_exception(error))]
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
        shutil.rmtree(root)
    log = "\n".join(lines)
    if problems:
        tail = "\n".join(lines[-40:])
        raise AssertionError(
            f"seed {seed} broke:\n"
            + "\n".join(problems)
            + f"\n{tail}\nAgain: .venv/bin/python -m tests.model.simulation {seed}"
        )
    return log


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(simulate(int(argument)))
