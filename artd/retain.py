"""What is kept: the newest checkpoints of a run, and whatever is still served or trained from.

Owner of: checkpoints in state `retired`. Invariants: row first, files second; a checkpoint that is a parent of
unfinished work, under push or served is never retired; every row stays, only its files go.
"""

from __future__ import annotations

import logging
import sqlite3

import anyio
import anyio.to_thread
import msgspec

from artd_schema.crashpoint import reach
from artd_schema.spec import RunSpec

from .rundir import DataDir
from .store import fs
from .store.store import Store, emit, move

log = logging.getLogger(__name__)
PERIOD_S = 5.0

NEEDED = """
SELECT parent_id FROM job WHERE state IN ('queued', 'running', 'quarantined') AND parent_id IS NOT NULL
UNION SELECT checkpoint_id FROM push WHERE state IN ('prepared', 'sending', 'live')
UNION SELECT s.checkpoint_id FROM run r CROSS JOIN process p CROSS JOIN serving s
  ON s.engine = p.name AND s.spawn = p.spawn AND s.run_id = r.id
  WHERE json_extract(CAST(r.spec AS TEXT), '$.rollout_weights_mode') = 'lora'
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
        for run in c.execute("SELECT id, name, spec FROM run").fetchall():
            keep = msgspec.json.decode(run["spec"], type=RunSpec).keep_checkpoints
            for row in c.execute(DUE, {"run": run["id"], "keep": keep}).fetchall():
                move(c, "checkpoint", row["id"], "retired", start="committed")
                emit(c, now, run["name"], "checkpoint.retired", row["step"])
                folders.append(row["dir"])
        return folders


def sweep(c: sqlite3.Connection, data: DataDir) -> list[str]:
    """At boot: folders of retired checkpoints, and folders below `checkpoints` that no row knows."""
    known = {row["dir"] for row in c.execute("SELECT dir FROM checkpoint WHERE state = 'committed'")}
    found = [str(path.relative_to(data.root)) for path in data.checkpoints.glob("*/*") if path.is_dir()]
    return [folder for folder in found if folder not in known]
