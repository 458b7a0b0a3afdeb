"""Lists the files that rows refer to, from one snapshot; the file checks run afterwards.

No read transaction is open while files are hashed, because it would keep the daemon from folding its write-ahead log.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True)
class Listing:
    """The files of one snapshot. `blobs` maps sha to bytes, `used` are the shas that some row refers to, `checkpoints` the rows
    of committed checkpoints with run and job, `retired` folders that may still exist, `batches` the rows with their run."""

    blobs: dict[str, int]
    used: frozenset[str]
    checkpoints: list[sqlite3.Row]
    retired: frozenset[str]
    batches: list[sqlite3.Row]


USED = """
SELECT blob FROM trajectory WHERE blob IS NOT NULL UNION SELECT blob FROM exchange WHERE blob IS NOT NULL
UNION SELECT metadata FROM trajectory_data WHERE metadata IS NOT NULL UNION SELECT tensors FROM batch WHERE tensors IS NOT NULL UNION SELECT manifest FROM batch
UNION SELECT replay FROM batch WHERE replay IS NOT NULL
UNION SELECT replay_manifest FROM batch WHERE replay_manifest IS NOT NULL"""
CHECKPOINTS = """
SELECT k.id, k.dir, k.sha, k.bytes, k.step, k.epoch, k.lineage, k.job_id AS job, j.fence, r.name AS run, r.base_digest,
  coalesce(p.sha, '') AS parent, coalesce(b.manifest, '') AS batch, CASE WHEN json_valid(CAST(r.spec AS TEXT)) THEN json_extract(CAST(r.spec AS TEXT), '$.parameters') END
  AS parameters
FROM checkpoint k JOIN job j ON j.id = k.job_id JOIN run r ON r.id = k.run_id LEFT JOIN checkpoint p ON p.id = k.parent_id
  LEFT JOIN batch b ON b.id = j.batch_id WHERE k.state = 'committed'"""
BATCHES = """
SELECT b.id, b.state, b.step, b.manifest, b.replay, b.replay_manifest, b.covered, b.trajectories, b.tokens, b.fill,
  r.name AS run, r.base_digest, r.routes
FROM batch b JOIN run r ON r.id = b.run_id"""


def read(c: sqlite3.Connection) -> Listing:
    """Read the listing in the open transaction of `c`. Raises sqlite3.DatabaseError."""
    return Listing(
        blobs=dict(c.execute("SELECT sha, bytes FROM blob").fetchall()),
        used=frozenset(row[0] for row in c.execute(USED)),
        checkpoints=c.execute(CHECKPOINTS).fetchall(),
        retired=frozenset(row[0] for row in c.execute("SELECT dir FROM checkpoint WHERE state = 'retired'")),
        batches=c.execute(BATCHES).fetchall(),
    )
