"""What is kept: the newest checkpoints of a run, and whatever is still served or trained from.

Owner of: checkpoints in state `retired`. Invariants: row first, files second; a checkpoint that is a parent of
unfinished work, under push or served is never retired; every row stays, only its files go.
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
from artd.store.selects import NOT_DELETED
from artd.store.store import Store, emit
from artd.store.views import stored_spec, unreadable
from artd.tables.checkpoints import retire_checkpoint
from artd_schema.crashpoint import reach

log = logging.getLogger(__name__)
PERIOD_S = 5.0

NEEDED = """
SELECT parent_id FROM job WHERE state IN ('queued', 'running', 'quarantined') AND parent_id IS NOT NULL
UNION SELECT checkpoint_id FROM push WHERE state IN ('prepared', 'sending', 'live')
UNION SELECT s.checkpoint_id FROM run r CROSS JOIN process p CROSS JOIN serving s
  ON s.engine = p.name AND s.spawn = p.spawn AND s.run_id = r.id
  WHERE CASE WHEN json_valid(CAST(r.spec AS TEXT))
    THEN json_extract(CAST(r.spec AS TEXT), '$.rollout_weights_mode') = 'lora' ELSE 1 END
UNION SELECT checkpoint_id FROM run WHERE checkpoint_id IS NOT NULL
"""
OF_CHAIN = "FROM checkpoint WHERE run_id = :run AND state = 'committed' AND abandoned = 0 AND id"
DUE = f"""
SELECT id, step, dir FROM checkpoint WHERE run_id = :run AND state = 'committed' AND id NOT IN ({NEEDED}) AND id NOT IN (
  SELECT id {OF_CHAIN} NOT IN ({NEEDED}) ORDER BY step DESC
  LIMIT max(0, :keep - (SELECT count(*) {OF_CHAIN} IN ({NEEDED}))))
"""


class Retain:
    """Retires checkpoints beyond `keep_checkpoints`, and those that a rollback left. In lora mode the engine may read an
    adapter again at any time, so every adapter that the running engine process ever served is kept until that process
    has gone."""

    def __init__(self, store: Store, data: DataDir) -> None:
        self._store = store
        self._data = data

    async def run(self) -> None:
        """Retire what is due after each change, until cancelled."""
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
        now = self._store.clock.now_ms()
        folders = []
        for run in c.execute(f"SELECT id, name, spec FROM run WHERE {NOT_DELETED}").fetchall():
            if unreadable(run):
                continue  # how many it keeps, nobody knows
            keep = stored_spec(run).keep_checkpoints
            for row in c.execute(DUE, {"run": run["id"], "keep": keep}).fetchall():
                retire_checkpoint(c, row["id"])
                emit(c, now, run["name"], "checkpoint.retired", row["step"])
                folders.append(row["dir"])
        return folders


@dataclass
class Swept:
    """What a boot found. gone: checkpoint folders that a row says nobody needs; unknown: those of which no row says anything;
    both relative to the data folder. staged: folders below `tmp`, all of workers that are dead."""

    gone: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    staged: list[Path] = field(default_factory=list)


ENDED = (
    "SELECT 1 FROM attempt a JOIN job j ON j.id = a.job_id JOIN run r ON r.id = j.run_id"
    " WHERE r.name = ? AND a.job_id = ? AND a.fence = ? AND a.outcome <> 'succeeded'"
)


def sweep(c: sqlite3.Connection, data: DataDir) -> Swept:
    """At boot, when no attempt is under way any more: only names that artd alone makes are looked at. A folder of an attempt that
    this database does not know may be the only copy of a step: the database is older than the folder."""
    known = dict(c.execute("SELECT dir, state FROM checkpoint").fetchall())
    swept = Swept(staged=[path for path in data.tmp.iterdir() if STAGED.fullmatch(path.name) and path.is_dir()])
    for path in sorted(data.checkpoints.glob("*/*")):
        folder = str(path.relative_to(data.root))
        named = CHECKPOINT.fullmatch(folder)
        if named is None or not path.is_dir() or known.get(folder) == "committed":
            continue
        ended = c.execute(ENDED, (named["run"], int(named["job"]), int(named["fence"]))).fetchone()
        (swept.gone if ended or folder in known else swept.unknown).append(folder)
    return swept
