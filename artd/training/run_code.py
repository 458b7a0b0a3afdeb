"""Reports when a run continues with other package code than the code that trained its last step."""

from __future__ import annotations

import functools
import logging
import sqlite3
from pathlib import Path

import anyio.to_thread

from artd.store.store import Store, emit
from artd_schema.codec import UNREADABLE
from artd_schema.data.manifest import read_code
from artd_schema.packages import PackageCode, RunCode

log = logging.getLogger(__name__)
_LAST = (
    "SELECT r.name, k.step, k.dir FROM checkpoint k JOIN run r ON r.id = k.run_id"
    " WHERE k.run_id = ? AND k.state = 'committed' AND k.abandoned = 0 ORDER BY k.step DESC LIMIT 1"
)


async def tell_changes(store: Store, data: Path, run: int, present: RunCode) -> None:
    """Compare the run's code with that of its last checkpoint. A difference becomes an event `run.code` and a warning;
    the run goes on."""
    for row in await store.read(_LAST, (run,)):
        try:
            before = await anyio.to_thread.run_sync(read_code, data / row["dir"])
        except (*UNREADABLE, OSError):
            return  # the trainer reads the same checkpoint and reports what is wrong with it
        for what, old, new in (("loss", before.loss, present.loss), ("family", before.family, present.family)):
            if old != new:
                await store.write(
                    functools.partial(_tell, store.clock.now_ms(), row, what, describe(old), describe(new))
                )


def _tell(now: int, row: sqlite3.Row, what: str, before: str, present: str, c: sqlite3.Connection) -> None:
    log.warning(
        "run %s: its %s was %s up to step %d and is %s from now on; install the other one and start artd again if this was not meant",
        row["name"], what, before, row["step"], present,
    )  # fmt: skip
    emit(c, now, row["name"], "run.code", what, step=row["step"], before=before, present=present)


def describe(code: PackageCode | None) -> str:
    """Return package, version and digest, or "no package's" for a run without package code."""
    return f"{code.distribution} {code.version} ({code.digest})" if code else "no package's"
