"""`python -m tests.crash.dropped FOLDER PHASE`: a daemon's folder around a staged result whose last fsync fails.

Run it under the shim. Phase `stage` leaves a running job and its staged result, as on a machine where the trainer sees the
fsync of its manifest fail and the daemon is killed before it hears of that. Phase `boot` is the next start.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from artd.recover import identify, recover
from artd.store import fs
from artd.store.store import Store
from tests.crash.io_errors import Failing, Life
from tests.fakes.rows import FakeClock, data_dir, never
from tests.fakes.staging import stage
from tests.fakes.steps import claim, packed_run

from .shim import Failure


async def opened(root: Path) -> Store:
    store = Store(root / "artd.db", FakeClock(), never)
    await store.open()
    return store


async def staged(root: Path) -> None:
    store = await opened(root)
    order = await claim(store, await packed_run(store, root))
    failing = Failing(Life(str(root), "", str(Failure("fsync", 1, 5, part="manifest.json")), worker=True))
    try:
        with failing.during(worker=True):
            stage(Path(order.dir), order)
    except OSError as error:
        print(error.errno, flush=True)
    os._exit(0)


async def boot(root: Path) -> None:
    store, data = await opened(root), data_dir(root)
    await store.write(lambda c: identify(c, data, store.clock.now_ms()))
    await recover(store, data)
    print((await store.read("SELECT step FROM run"))[0][0], flush=True)
    os._exit(0)  # what it has told is told; nothing is put in order


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name in ("tmp", "blobs", "checkpoints", "code", "logs"):
        fs.make_dir(root / name)
    asyncio.run(staged(root) if sys.argv[2] == "stage" else boot(root))
