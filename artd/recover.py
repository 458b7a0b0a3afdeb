"""Recovers at boot: brings the data folder from any state that the last daemon left to one that the services can start
from.

Owns the order of recovery. Recovery is idempotent, so the next boot cures a crash in the middle of it. The same
function with the same guards adopts a finished but uncommitted result and commits a reported one. Only the database
decides. Threads read, write and remove files, so that the daemon's heart beats meanwhile.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import uuid
from pathlib import Path

import anyio
import anyio.to_thread

from artd.datadir.layout import DataDir
from artd.retention import clock_jumps
from artd.retention.checkpoints import Leftovers, find_leftovers
from artd.runs.lifecycle import pause_unreadable
from artd.serving.push_ends import engines_with_pushes, forget_engine
from artd.store import fs
from artd.store.store import Store, emit, get_meta, set_meta
from artd.store.views import unreadable
from artd.tables.jobs import end_attempt
from artd.tables.processes import stop_all
from artd.training import commit as result
from artd.training.commit import BadResult, Stale
from artd_schema.crashpoint import reach
from artd_schema.data.manifest import MANIFEST_FILE

log = logging.getLogger(__name__)
FIRST = "1"
"""The number of the boot that made the database; that boot deletes nothing."""


def identify(c: sqlite3.Connection, data: DataDir, now: int) -> tuple[str, int]:
    """Record a new boot. A copied or restored data folder becomes a new instance.

    Returns (instance, boot); `boot` counts the daemon's starts.
    """
    stat = os.stat(data.database)
    place = f"{stat.st_dev}:{stat.st_ino}"
    instance = get_meta(c, "instance")
    if not instance or get_meta(c, "place") != place:
        instance = uuid.uuid4().hex
        set_meta(c, "instance", instance)
        set_meta(c, "place", place)
        set_meta(c, "created", str(now))
    clock_jumps.boot(c, now)  # first, because everything after it writes the present time
    boot = int(get_meta(c, "boot", "0")) + 1
    set_meta(c, "boot", str(boot))
    set_meta(c, "sqlite", sqlite3.sqlite_version)
    emit(c, now, "", "daemon.started", boot, clean=get_meta(c, "clean", "1") == "1", pid=os.getpid())
    set_meta(c, "clean", "0")
    return instance, boot


async def recover(store: Store, data: DataDir) -> None:
    """Recover the data folder. Call it after every worker of older boots is proven dead and `identify` has written its rows."""
    reach("reap.done")
    fs.fsync_dir(data.root)  # makes the WAL's name durable: SQLite does it too, but hides a failure
    await _adopt_finished(store, data)
    reach("recover.adopted")

    def write(c: sqlite3.Connection) -> Leftovers:
        interrupt(c, store.clock.now_ms(), "the daemon went down")
        for why in pause_unreadable(c, store.clock.now_ms()):
            log.error("%s", why)
        return Leftovers() if get_meta(c, "boot") == FIRST else find_leftovers(c, data)

    swept = await store.write(write)
    reach("recover.interrupted")
    for folder in swept.gone:
        log.info("removing %s: its job did not commit it, or it is retired", folder)
        await anyio.to_thread.run_sync(fs.remove_tree, data.root / folder)
        reach("recover.removed")
    for folder in swept.unknown:
        log.warning("moving %s to %s: the database does not know it", folder, data.unknown)
        await anyio.to_thread.run_sync(_move_aside, data, folder)
    for path in swept.staged:
        await anyio.to_thread.run_sync(fs.remove_tree, path)


def _move_aside(data: DataDir, folder: str) -> None:
    target, number = data.unknown / folder, 1
    while target.exists():
        target, number = data.unknown / f"{folder}.{number}", number + 1
    fs.publish(data.root / folder, target)


def interrupt(c: sqlite3.Connection, now: int, why: str) -> None:
    """Take back all work under way. No worker lives any more."""
    for job in c.execute("SELECT * FROM job WHERE state = 'running'").fetchall():
        end_attempt(c, now, job, "killed", f"{why} while it ran")
    for engine in engines_with_pushes(c):
        forget_engine(c, now, engine, why, counted=False)
    stop_all(c, now)


async def _adopt_finished(store: Store, data: DataDir) -> None:
    """Commit the results of running jobs whose files are whole, in the staging or the final folder."""
    rows = await store.read(
        "SELECT j.id, j.fence, j.step, r.name, r.spec, r.lineage FROM job j JOIN run r ON r.id = j.run_id WHERE j.state = 'running'"
    )
    for job in rows:
        if unreadable(job):
            continue  # a commit needs the spec; the job runs again after the run resumes
        published = data.root / data.checkpoint(job["name"], job["lineage"], job["step"], job["id"], job["fence"])
        for folder in (published, data.staging(job["id"], job["fence"])):
            if (folder / MANIFEST_FILE).exists() and await _adopt(store, data, folder):
                break


async def _adopt(store: Store, data: DataDir, folder: Path) -> bool:
    try:
        # The process that staged it may have had a failed fsync.
        await anyio.to_thread.run_sync(fs.write_again, folder)
        sha, manifest = await anyio.to_thread.run_sync(result.verify, folder)
        relative = await anyio.to_thread.run_sync(result.publish, data, folder, manifest)
        now = store.clock.now_ms()
        await store.write(lambda c: result.commit(c, now, data, relative, sha, manifest, {}))
    except (BadResult, Stale) as error:
        log.warning("did not adopt the result in %s: %s", folder, error)
        return False
    except OSError as error:
        if not fs.is_full(error):
            raise
        log.warning("did not adopt the result in %s, so its job runs again: %s", folder, error)
        return False
    log.info("adopted the finished result of job %d, step %d", manifest.job, manifest.step)
    return True
