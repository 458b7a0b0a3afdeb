"""One process of load for `tests.bench.ingest --only flood`: it floods with large bodies, or times small submits.

Owner of: nothing. Invariants: every line of `times` is one acknowledged submit, in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

from artd_client import ArtdError, Client, Turn
from tests.daemon.rig import ROOT

RUN = "bench"


async def flood(data: str, turn: Turn, in_flight: int, seconds: float, name: str) -> int:
    """Keep `in_flight` submits of this body going; how many were acknowledged. A Busy of a full daemon is tried again."""
    numbers, done = itertools.count(), 0

    async def stream() -> None:
        nonlocal done
        while time.monotonic() < end:
            number = next(numbers)
            with contextlib.suppress(ArtdError):
                await run.submit(f"{name}-{number // 8}", float(number % 8), turns=[turn], key=f"{name}-{number}")
                done += 1

    async with Client(data, timeout=seconds + 60) as client:
        run = await client.run(RUN)
        end = time.monotonic() + seconds
        await asyncio.gather(*(stream() for _ in range(in_flight)))
    return done


async def times(data: str, turn: Turn, seconds: float, name: str) -> list[float]:
    """Milliseconds of small submits, one after the other, 20 ms apart."""
    found = []
    async with Client(data, timeout=60) as client:
        run = await client.run(RUN)
        end = time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() >= end:
                return found
            began = time.monotonic()
            await run.submit(f"{name}-{number // 8}", float(number % 8), turns=[turn], key=f"{name}-{number}")
            found.append(1000 * (time.monotonic() - began))
            await asyncio.sleep(0.02)
    return found


def spawn(kind: str, data: Path, size: int, in_flight: int, seconds: float, name: str) -> subprocess.Popen[str]:
    """`communicate()` gives JSON: a number of submits for `flood`, a list of milliseconds for `times`."""
    command = [
        sys.executable,
        "-m",
        "tests.bench.flood",
        kind,
        str(data),
        str(size),
        str(in_flight),
        str(seconds),
        name,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    from tests.bench.ingest import make_turn

    kind, data, size, in_flight, seconds, name = sys.argv[1:]
    body = make_turn(int(size))
    if kind == "flood":
        print(json.dumps(asyncio.run(flood(data, body, int(in_flight), float(seconds), name))))
    else:
        print(json.dumps(asyncio.run(times(data, body, float(seconds), name))))
