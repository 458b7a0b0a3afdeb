"""Retires old checkpoints: deletes the files of those that no run keeps and nothing uses.

The row of a checkpoint becomes `retired` before its files go, and stays. A checkpoint stays whole while it is the parent of
unfinished work, is being pushed or is served.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread

from artd.datadir.layout import CHECKPOINT, STAGED, DataDir
from artd.store import fs
from artd.store.selects import NOT_DELETED, UNFINISHED
from artd.store.store import Store, emit
from artd.store.views import stored_spec, unreadable
from artd.tables.checkpoints import retire_checkpoint
from artd_schema.crashpoint import reach

log = logging.getLogger(__name__)
PERIOD_S = 5.0

NEEDED = """
SELECT parent_id FROM job WHERE state IN ('queued', 'running', 'quarantined') AND parent_id IS NOT NULL
UNION SELECT checkpoint_id FROM push WHERE state IN ('prepared', 'sending', 'live')
UNION SELECT s.checkpoint_id FROM process p CROSS JOIN serving s ON s.engine = p.name AND s.spawn = p.spawn
  JOIN run r ON r.id = s.run_id
  WHERE p.state <> 'stopped' AND CASE WHEN json_valid(CAST(r.spec AS TEXT))
    THEN json_extract(CAST(r.spec AS TEXT), '$.rollout_weights_mode') = 'lora' ELSE 1 END
UNION SELECT checkpoint_id FROM run WHERE checkpoint_id IS NOT NULL
"""
OF_CHAIN = "FROM checkpoint WHERE run_id = :run AND state = 'committed' AND abandoned = 0 AND id"
DUE = f"""
SELECT id, step, dir FROM checkpoint WHERE run_id = :run AND state = 'committed' AND id NOT IN ({NEEDED}) AND id NOT IN (
  SELECT id {OF_CHAIN} NOT IN ({NEEDED}) ORDER BY step DESC
  LIMIT max(0, :keep - (SELECT count(*) {OF_CHAIN} IN ({NEEDED}))))
"""


HELD = f"""
SELECT 1 FROM checkpoint k JOIN run r ON r.id = k.run_id WHERE k.run_id = :run AND k.state = 'committed'
  AND k.id IS NOT r.checkpoint_id AND k.id IN ({NEEDED}) LIMIT 1"""
"""Whether something that passes keeps a checkpoint of a run from being retired."""


class CheckpointRetention:
    """Retires checkpoints beyond `keep_checkpoints` and those that a rollback abandoned.

    In lora mode the engine may read an adapter again at any time. So every adapter that the running engine process has ever
    served is kept until that process ends.
    """

    def __init__(self, store: Store, data: DataDir) -> None:
        self._store = store
        self._data = data
        self._settled: set[int] = set()  # finished runs with nothing left to retire

    async def run(self) -> None:
        """Retire what is due after each change of the database, until cancelled."""
        while True:
            changed = self._store.change()
            folders = await self._store.write(self._retire)
            if folders:
                reach("retain.retired")
            for folder in folders:
                await anyio.to_thread.run_sync(fs.remove_tree, self._data.root / folder)
            await changed.wait()
            await anyio.sleep(PERIOD_S)

    def _retire(self, c: sqlite3.Connection) -> list[str]:
        finished = {row["id"] for row in c.execute("SELECT id FROM run WHERE state = 'finished'")}
        folders = []
        for run in [row["id"] for row in c.execute(f"SELECT id FROM run WHERE {UNFINISHED}")]:
            folders += self._retire_of(c, run)
        for run in finished - self._settled:
            found = self._retire_of(c, run)
            if not found and c.execute(HELD, {"run": run}).fetchone() is None:
                self._settled.add(run)
            folders += found
        return folders

    def _retire_of(self, c: sqlite3.Connection, run_id: int) -> list[str]:
        """Retire what is due of one run. Returns the folders to remove."""
        run = c.execute(f"SELECT id, name, spec FROM run WHERE id = ? AND {NOT_DELETED}", (run_id,)).fetchone()
        if run is None or unreadable(run):
            return []  # nobody knows how many an unreadable one keeps
        keep = stored_spec(run).keep_checkpoints
        due = c.execute(DUE, {"run": run_id, "keep": keep}).fetchall()
        for row in due:
            retire_checkpoint(c, row["id"])
            emit(c, self._store.clock.now_ms(), run["name"], "checkpoint.retired", row["step"])
        return [row["dir"] for row in due]


@dataclass
class Leftovers:
    """What a boot found on disk that no committed checkpoint needs.

    `gone`: checkpoint folders that a row says nobody needs. `unknown`: checkpoint folders that no row names. Both are relative
    to the data folder. `staged`: folders below `tmp`, which only dead workers have written.
    """

    gone: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    staged: list[Path] = field(default_factory=list)


ENDED = (
    "SELECT 1 FROM attempt a JOIN job j ON j.id = a.job_id JOIN run r ON r.id = j.run_id"
    " WHERE r.name = ? AND a.job_id = ? AND a.fence = ? AND a.outcome <> 'succeeded'"
)


def find_leftovers(c: sqlite3.Connection, data: DataDir) -> Leftovers:
    """Find leftover checkpoint folders at boot, before any attempt starts. It changes nothing.

    It looks only at names that artd itself makes. A folder that belongs to no known attempt may be the only copy of a step: a
    database that was restored from a backup is older than such a folder. It is reported as `unknown`.
    """
    known = dict(c.execute("SELECT dir, state FROM checkpoint").fetchall())
    found = Leftovers(staged=[path for path in data.tmp.iterdir() if STAGED.fullmatch(path.name) and path.is_dir()])
    for path in sorted(data.checkpoints.glob("*/*")):
        folder = str(path.relative_to(data.root))
        named = CHECKPOINT.fullmatch(folder)
        if named is None or not path.is_dir() or known.get(folder) == "committed":
            continue
        ended = c.execute(ENDED, (named["run"], int(named["job"]), int(named["fence"]))).fetchone()
        (found.gone if ended or folder in known else found.unknown).append(folder)
    return found
