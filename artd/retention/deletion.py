"""Carries out `artctl delete RUN`: deletes a finished run with its rows, checkpoints and blobs.

The order is durable before it is answered, and goes on over any number of boots. A run that is being deleted gets a name that
begins with ".", which no client can give, so no request reaches it. Rows go a few at a time, so that no other writer waits
long. The run's own row stays under a name of its own, so that its id is never used again. The garbage collector deletes the
blobs, which nothing refers to any more.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread

from artd.datadir.layout import DataDir
from artd.datadir.log_files import older
from artd.errors import Conflict, NotFound
from artd.store import fs
from artd.store.store import Store, delete_events, delete_meta, emit, get_meta, set_meta
from artd.tables.batches import delete_batches
from artd.tables.checkpoints import delete_checkpoints, delete_metrics, retire_checkpoint
from artd.tables.exchanges import delete_exchanges
from artd.tables.groups import delete_counts, delete_groups
from artd.tables.jobs import delete_jobs, forget_parents
from artd.tables.once import first_time
from artd.tables.processes import delete_processes
from artd.tables.pushes import delete_pushes
from artd.tables.rollouts import delete_rollouts
from artd.tables.runs import forget_newest, rename_run
from artd.tables.served import delete_served
from artd.tables.trajectories import delete_trajectories
from artd_schema.wire import client_api as api

log = logging.getLogger(__name__)
PERIOD_S = 1.0
ROWS = 256
"""The most that one transaction deletes."""
Ids = Sequence[tuple[int]]
Delete = Callable[[sqlite3.Connection, Ids], None]
DELETING, DELETED = ".deleting.", ".deleted."
DUE = f"""
SELECT r.id, r.name FROM run r WHERE r.name GLOB '{DELETING}*'
  AND NOT EXISTS (SELECT 1 FROM job j WHERE j.state = 'running' AND j.run_id = r.id)
  AND NOT EXISTS (SELECT 1 FROM push p WHERE p.state = 'sending' AND p.run_id = r.id)
  AND NOT EXISTS (SELECT 1 FROM serving s WHERE s.run_id = r.id AND s.state IN ('live', 'draining'))
  AND NOT EXISTS (SELECT 1 FROM process p WHERE p.run_id = r.id AND p.state <> 'stopped')"""


def _delete_checkpoints(c: sqlite3.Connection, ids: Ids) -> None:
    forget_parents(c, ids)
    delete_checkpoints(c, ids)


SLICES: tuple[tuple[str, Delete], ...] = (
    ("exchange", delete_exchanges),
    ("rollout", delete_rollouts),
    ("trajectory", delete_trajectories),
    ("trajectory_group", delete_groups),
    ("serving", delete_served),
    ("push", delete_pushes),
    ("checkpoint", _delete_checkpoints),
    ("job", delete_jobs),
    ("batch", delete_batches),
)
"""Tables in the order in which a run's rows are deleted, and the function that deletes rows with what refers to them."""


def mark(c: sqlite3.Connection, now: int, op: api.DeleteRun) -> api.Done:
    """Mark a finished run for deletion. Raises NotFound for an unknown run and Conflict for one that is not finished."""
    if not first_time(c, now, op.request):
        return api.Done()
    run = c.execute("SELECT id, state FROM run WHERE name = ?", (op.run,)).fetchone()
    if run is None:
        raise NotFound(f"there is no run {op.run!r}; `artctl runs` lists them", field="run")
    if run["state"] != "finished":
        raise Conflict(f"run {op.run!r} is {run['state']}, and only a finished run can be deleted", field="run")
    emit(c, now, "", "run.deleted", op.run)
    (newest,) = c.execute("SELECT max(id) FROM event").fetchone()
    set_meta(c, _bound(run["id"]), str(newest))
    rename_run(c, run["id"], f"{DELETING}{run['id']}.{op.run}")
    return api.Done()


class Deleter:
    """Deletes the runs that `mark` marked, once no worker works for them."""

    def __init__(self, store: Store, data: DataDir) -> None:
        self._store = store
        self._data = data

    async def run(self) -> None:
        """Delete what is due after each change of the database, until cancelled."""
        while True:
            changed = self._store.change()
            for row in await self._store.read(DUE):
                await self._delete(row["id"], row["name"])
            await changed.wait()
            await anyio.sleep(PERIOD_S)

    async def _delete(self, run: int, name: str) -> None:
        await self._delete_files(run)
        for table, delete in SLICES:
            await self._delete_rows(run, table, delete)
        await self._delete_events(run, name)
        await self._store.write(lambda c: self._end(c, run))
        log.info("deleted run %s", _original(run, name))

    async def _delete_files(self, run: int) -> None:
        """Delete the logs of the run's workers, and the folders of its checkpoints after their rows say so."""
        await self._store.write(lambda c: _retire(c, run))
        for row in await self._store.read("SELECT dir FROM checkpoint WHERE run_id = ?", (run,)):
            await anyio.to_thread.run_sync(fs.remove_tree, self._data.root / row["dir"])
        for worker in await self._store.read("SELECT name FROM process WHERE run_id = ?", (run,)):
            await anyio.to_thread.run_sync(self._remove_logs, worker["name"])

    def _remove_logs(self, worker: str) -> None:
        for log in (self._data.log(worker), self._data.server_log(worker)):
            for path in (log, older(log)):
                path.unlink(missing_ok=True)

    async def _delete_rows(self, run: int, table: str, delete: Delete) -> None:
        find = f"SELECT id FROM {table} WHERE run_id = ? LIMIT ?"

        def write(c: sqlite3.Connection) -> int:
            found = [(row["id"],) for row in c.execute(find, (run, ROWS))]
            delete(c, found)
            return len(found)

        while await self._store.write(write):
            pass

    async def _delete_events(self, run: int, name: str) -> None:
        """Delete the run's events up to its deletion; a newer run may have the same name."""
        find = "SELECT id FROM event WHERE run = ? AND id <= ? LIMIT ?"

        def write(c: sqlite3.Connection) -> int:
            bound = int(get_meta(c, _bound(run), "0"))
            found = [(row["id"],) for row in c.execute(find, (_original(run, name), bound, ROWS))]
            delete_events(c, found)
            return len(found)

        while await self._store.write(write):
            pass

    def _end(self, c: sqlite3.Connection, run: int) -> None:
        delete_processes(c, run)
        delete_metrics(c, run)
        delete_counts(c, run)
        delete_meta(c, _bound(run))
        rename_run(c, run, f"{DELETED}{run}")


def _retire(c: sqlite3.Connection, run: int) -> None:
    for row in c.execute("SELECT id FROM checkpoint WHERE run_id = ? AND state = 'committed'", (run,)).fetchall():
        retire_checkpoint(c, row["id"])
    forget_newest(c, run)


def _bound(run: int) -> str:
    """Return the name of the meta row that holds the newest event at the time of the order."""
    return f"deleting {run}"


def _original(run: int, name: str) -> str:
    return name.removeprefix(f"{DELETING}{run}.")
