"""`python -m tests.soak.client ROOT --name N`: one rollout program of a soak, in a process that may be killed at any moment.

It writes ROOT/NAME.journal. Files steer it: while ROOT/rest exists it begins nothing new; once ROOT/end exists it finishes what
it began and ends with status 0. It never gives up on a daemon or a gateway that is away.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from artd_client import ArtdError, Client
from artd_client.run import Run
from tests.fakes.script import Script

from .evidence import verified
from .journal import Journal
from .load import AGAIN_S, Load

BACKLOG = 3  # sealed groups that may wait before a client holds off
PATIENCE_S = 10.0


async def attached(stack: AsyncExitStack, data: Path, name: str) -> Run:
    """The run, as soon as there is a daemon that has it."""
    while True:
        try:
            client = await stack.enter_async_context(Client(data, timeout=PATIENCE_S))
            return await client.run(name)
        except ArtdError:
            await asyncio.sleep(AGAIN_S)


async def held_off(run: Run, root: Path) -> bool:
    """Wait while enough waits already or the soak rests; False when it is over."""
    while not (root / "end").exists():
        try:
            if not (root / "rest").exists() and len(await run.groups(("sealed",), BACKLOG)) < BACKLOG:
                return True
        except ArtdError:
            pass
        await asyncio.sleep(AGAIN_S)
    return False


async def main(root: Path, name: str, groups: int, vocab: int, gap_s: float, real: bool) -> None:
    script = None if real else Script(root / "script.json")
    async with AsyncExitStack() as stack:
        journal = Journal(root / f"{name}.journal")
        stack.callback(journal.close)
        load = Load(name, journal, vocab, (lambda tokens: verified(script, tokens)) if script else None)
        run = await attached(stack, root / "data", "r")
        web = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
        if groups:
            for _ in range(groups):
                await load.group(run, web)
            return
        while await held_off(run, root):
            await load.group(run, web)
            await asyncio.sleep(random.uniform(0, gap_s))
        if load.begun:
            await load.group(run, web)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--groups", type=int, default=0, help="end after so many")
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--gap", type=float, default=0.2, help="seconds between two groups, at most")
    parser.add_argument("--real", action="store_true", help="the engine does not say which weights it holds")
    args = parser.parse_args()
    asyncio.run(main(args.root, args.name, args.groups, args.vocab, args.gap, args.real))
