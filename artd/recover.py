"""Boot: from whatever the last daemon left to a state that the services can go on from.

Owner of: the order of recovery. Invariants: idempotent, so a crash in the middle is cured by the next boot; a
finished but uncommitted result is adopted by the same function with the same guards as a reported one; only the
database decides.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import uuid
from pathlib import Path

from artd_schema.crashpoint import reach

from . import commit as result
from . import times
from .commit import BadResult, Stale
from .jobs import end_attempt
from .push import forget_engine
from .retain import sweep
from .rundir import DataDir
from .store import fs
from .store.store import Store, emit, get_meta, set_meta

log = logging.getLogger(__name__)


def identify(c: sqlite3.Connection, data: DataDir, now: int) -> tuple[str, int]:
    """(instance, boot): a copied or restored data folder becomes an instance of its own; boot counts the daemon's
    starts."""
    stat = os.stat(data.database)
    place = f"{stat.st_dev}:{stat.st_ino}"
    instance = get_meta(c, "instance")
    if not instance or get_meta(c, "place") != place:
        instance = uuid.uuid4().hex
        set_meta(c, "instance", instance)
        set_meta(c, "place", place)
        set_meta(c, "created", str(now))
    times.boot(c, now)  # before anything is written that bears the present time
    boot = int(get_meta(c, "boot", "0")) + 1
    set_meta(c, "boot", str(boot))
    set_meta(c, "sqlite", sqlite3.sqlite_version)
    emit(c, now, "", "daemon.started", boot, clean=get_meta(c, "clean", "1") == "1", pid=os.getpid())
    set_meta(c, "clean", "0")
    return instance, boot


async def recover(store: Store, data: DataDir) -> None:
    """Every worker of older boots is proven dead before this runs, and this boot has written its first rows."""
    reach("reap.done")
    fs.fsync_dir(data.root)  # the WAL's name: SQLite does it too, but tells nobody when it cannot
    await _adopt_finished(store, data)
    reach("recover.adopted")

    def write(c: sqlite3.Connection) -> list[str]:
        interrupt(c, store.clock.now_ms(), "the daemon went down")
        return sweep(c, data)

    folders = await store.write(write)
    reach("recover.interrupted")
    for folder in folders:
        log.info("removing %s: no committed checkpoint owns it", folder)
        fs.remove_tree(data.root / folder)
        reach("recover.removed")
    for path in data.tmp.iterdir():
        fs.remove_tree(path) if path.is_dir() else path.unlink()


def interrupt(c: sqlite3.Connection, now: int, why: str) -> None:
    """Take back everything that was under way: no worker lives any more."""
    for job in c.execute("SELECT * FROM job WHERE state = 'running'").fetchall():
        end_attempt(c, now, job, "killed", f"{why} while it ran")
    forget_engine(c, now, why, counted=False)
    c.execute(
        "UPDATE process SET state = 'stopped', pid = NULL, ticks = NULL, session = NULL, address = '', since = ?",
        (now,),
    )


async def _adopt_finished(store: Store, data: DataDir) -> None:
    """Commit the result of a running job whose files are whole, wherever the crash left them."""
    rows = await store.read(
        "SELECT j.id, j.fence, j.step, r.name, r.lineage FROM job j JOIN run r ON r.id = j.run_id WHERE j.state = 'running'"
    )
    for job in rows:
        published = data.root / data.checkpoint(job["name"], job["lineage"], job["step"], job["id"], job["fence"])
        for folder in (published, data.staging(job["id"], job["fence"])):
            if (folder / result.MANIFEST).exists() and await _adopt(store, data, folder):
                break


async def _adopt(store: Store, data: DataDir, folder: Path) -> bool:
    try:
        sha, manifest = result.verify(folder)
        relative = result.publish(data, folder, manifest)
        now = store.clock.now_ms()
        await store.write(lambda c: result.commit(c, now, data, relative, sha, manifest, {}))
    except (BadResult, Stale) as error:
        log.warning("the result in %s is not adopted: %s", folder, error)
        return False
    log.info("adopted the finished result of job %d, step %d", manifest.job, manifest.step)
    return True
