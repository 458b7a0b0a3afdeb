"""`artctl delete RUN`: a finished run goes, with its rows, checkpoints and contents.

Owner of: the rows of runs that are being deleted. Invariants: the order is durable before it is answered, and is carried
out over any number of boots; a name that begins with "." is no run's to give, so nobody can reach such a run by a request;
rows go a few at a time, so that nobody waits for the writer; the run's own row stays as a tombstone, so that its id is
never given again. Contents become blobs that nothing refers to, which `gc` collects.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass

import anyio
import anyio.to_thread

from artd.datadir.layout import DataDir
from artd.errors import Conflict, NotFound
from artd.store import fs
from artd.store.store import Store, emit, get_meta, move, set_meta
from artd.tables.once import first_time
from artd_schema import client_api as api

log = logging.getLogger(__name__)
PERIOD_S = 1.0
ROWS = 256
"""Of one transaction."""
DELETING, DELETED = ".deleting.", ".deleted."
DUE = f"""
SELECT r.id, r.name FROM run r WHERE r.name GLOB '{DELETING}*'
  AND NOT EXISTS (SELECT 1 FROM job j WHERE j.state = 'running' AND j.run_id = r.id)
  AND NOT EXISTS (SELECT 1 FROM push p WHERE p.state = 'sending' AND p.run_id = r.id)
  AND NOT EXISTS (SELECT 1 FROM serving s WHERE s.state <> 'gone' AND s.run_id = r.id)"""


@dataclass(frozen=True)
class Slice:
    """Rows of a run that go together: those of `table`, and what refers to each of them."""

    table: str
    first: tuple[str, ...] = ()


SLICES = (
    Slice("exchange"),
    Slice("trajectory", ("DELETE FROM trajectory_data WHERE trajectory_id = ?",)),
    Slice("trajectory_group"),
    Slice("serving"),
    Slice("push"),
    Slice(
        "checkpoint",
        (
            "UPDATE job SET parent_id = NULL WHERE parent_id = ?",
            "UPDATE checkpoint SET parent_id = NULL WHERE parent_id = ?",
        ),
    ),
    Slice("job", ("DELETE FROM attempt WHERE job_id = ?",)),
    Slice("batch"),
)


def mark(c: sqlite3.Connection, now: int, op: api.DeleteRun) -> api.Done:
    """Give a finished run away for deletion. Errors: NotFound, Conflict."""
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
    c.execute("UPDATE run SET name = ? WHERE id = ?", (f"{DELETING}{run['id']}.{op.run}", run["id"]))
    return api.Done()


class Deleter:
    """Deletes what `mark` gave away, once no worker has anything to do with it."""

    def __init__(self, store: Store, data: DataDir) -> None:
        self._store = store
        self._data = data

    async def run(self) -> None:
        """Delete what is due after each change, until cancelled."""
        while True:
            changed = self._store.change()
            for row in await self._store.read(DUE):
                await self._delete(row["id"], row["name"])
            await changed.wait()
            await anyio.sleep(PERIOD_S)

    async def _delete(self, run: int, name: str) -> None:
        await self._delete_files(run)
        for part in SLICES:
            await self._delete_rows(run, part)
        await self._delete_events(run, name)
        await self._store.write(lambda c: self._end(c, run))
        log.info("deleted run %s", _original(run, name))

    async def _delete_files(self, run: int) -> None:
        """The folders of its checkpoints, whose rows say first that they are gone."""
        await self._store.write(lambda c: _retire(c, run))
        for row in await self._store.read("SELECT dir FROM checkpoint WHERE run_id = ?", (run,)):
            await anyio.to_thread.run_sync(fs.remove_tree, self._data.root / row["dir"])

    async def _delete_rows(self, run: int, part: Slice) -> None:
        find = f"SELECT id FROM {part.table} WHERE run_id = ? LIMIT ?"

        def write(c: sqlite3.Connection) -> int:
            found = [(row["id"],) for row in c.execute(find, (run, ROWS))]
            for sql in (*part.first, f"DELETE FROM {part.table} WHERE id = ?"):
                c.executemany(sql, found)
            return len(found)

        while await self._store.write(write):
            pass

    async def _delete_events(self, run: int, name: str) -> None:
        """Those up to the deletion: a new run may have the name by now."""
        find = "SELECT id FROM event WHERE run = ? AND id <= ? LIMIT ?"

        def write(c: sqlite3.Connection) -> int:
            bound = int(get_meta(c, _bound(run), "0"))
            found = [(row["id"],) for row in c.execute(find, (_original(run, name), bound, ROWS))]
            c.executemany("DELETE FROM event WHERE id = ?", found)
            return len(found)

        while await self._store.write(write):
            pass

    def _end(self, c: sqlite3.Connection, run: int) -> None:
        for table in ("metric", "group_count"):
            c.execute(f"DELETE FROM {table} WHERE run_id = ?", (run,))
        c.execute("DELETE FROM meta WHERE key = ?", (_bound(run),))
        c.execute("UPDATE run SET name = ? WHERE id = ?", (f"{DELETED}{run}", run))


def _retire(c: sqlite3.Connection, run: int) -> None:
    for row in c.execute("SELECT id FROM checkpoint WHERE run_id = ? AND state = 'committed'", (run,)).fetchall():
        move(c, "checkpoint", row["id"], "retired", start="committed")
    c.execute("UPDATE run SET checkpoint_id = NULL, step = -1 WHERE id = ?", (run,))


def _bound(run: int) -> str:
    """Meta row: the newest event at the time of the order."""
    return f"deleting {run}"


def _original(run: int, name: str) -> str:
    return name.removeprefix(f"{DELETING}{run}.")
