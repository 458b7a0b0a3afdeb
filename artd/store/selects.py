"""Holds one SELECT a table: the columns that clients (`lists`) and the command line (`cli.read`) show.

A column has its name from the schema, except that `run` and `group` are the names of the run and the group, and that a
column of a joined table starts with that table's name. No SELECT returns payloads or blobs.
"""

from __future__ import annotations

JSON_COLUMNS = frozenset({"metrics", "seconds", "data", "spec", "packing"})

NOT_DELETED = "name NOT GLOB '.*'"
"""The SQL condition for a row of `run` that is not being deleted (`deletion`)."""

UNFINISHED = "state IN ('active', 'paused')"
"""The SQL condition for a row of `run` that is not finished, as the index `run_state` answers it."""

RUNS = f"""
SELECT r.id, r.name, r.state, r.reason, r.step, r.lineage, r.created, r.base_digest, r.spec, r.packing,
  coalesce((SELECT max(k.step) FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id
            WHERE s.run_id = r.id AND s.state = 'live'), -1) AS served
FROM run r WHERE r.{NOT_DELETED}"""
JOBS = """
SELECT j.id, r.name AS run, j.kind, j.step, j.epoch, j.state, j.fence, j.attempts, j.deaths, j.worker, j.spawn, j.cancel,
  j.discard, (SELECT a.outcome FROM attempt a WHERE a.job_id = j.id ORDER BY a.fence DESC LIMIT 1) AS failure, j.error,
  j.batch_id, b.tokens AS batch_tokens, b.covered AS batch_covered, p.step AS parent_step, j.metrics, j.seconds, j.created,
  j.started, j.ended, j.not_before, j.waiting
FROM job j JOIN run r ON r.id = j.run_id LEFT JOIN checkpoint p ON p.id = j.parent_id LEFT JOIN batch b ON b.id = j.batch_id"""
TRAJECTORIES = """
SELECT t.id, r.name AS run, g.name AS "group", t.key, t.split, t.state, t.reason, t.reward, t.tokens, t.epoch_min,
  t.epoch_max, t.batch_id, t.payload, t.digest, d.metrics, t.created
FROM trajectory t JOIN trajectory_data d ON d.trajectory_id = t.id JOIN run r ON r.id = t.run_id JOIN trajectory_group g ON g.id = t.group_id"""
GROUPS = """
SELECT g.id, r.name AS run, g.name, g.split, g.state, g.reason, g.size, g.created, g.deadline
FROM trajectory_group g JOIN run r ON r.id = g.run_id"""
ROLLOUTS = """
SELECT o.id, r.name AS run, o.name, o.state, o.trajectory_id,
  (SELECT count(*) FROM exchange e WHERE e.rollout_id = o.id AND e.choice = 0) AS responses,
  (SELECT count(*) FROM exchange e WHERE e.rollout_id = o.id AND e.choice = 0 AND e.delivery = 'superseded') AS superseded,
  o.created, o.touched
FROM rollout o JOIN run r ON r.id = o.run_id"""
BATCHES = """
SELECT b.id, r.name AS run, b.step, b.state, b.payload, b.trajectories, b.tokens, b.covered, b.fill, b.manifest, b.replay,
  b.created
FROM batch b JOIN run r ON r.id = b.run_id"""
CHECKPOINTS = """
SELECT k.id, r.name AS run, k.step, k.epoch, k.lineage, k.abandoned, p.step AS parent_step, k.job_id, k.state, k.sha, k.dir,
  k.bytes, k.created
FROM checkpoint k JOIN run r ON r.id = k.run_id LEFT JOIN checkpoint p ON p.id = k.parent_id"""
PUSHES = """
SELECT p.id, r.name AS run, p.engine, k.step, p.mode, p.source, p.transfer, p.state, p.fence, p.attempts, p.max_abs,
  p.mean_abs, p.seconds, p.error, p.created, p.started, p.ended, p.not_before
FROM push p JOIN run r ON r.id = p.run_id JOIN checkpoint k ON k.id = p.checkpoint_id"""
WORKERS = f"""
SELECT p.name AS name, p.kind AS kind, r.name AS run, p.replica, p.state, p.pid, p.ticks, p.boot_id, p.spawn, p.restarts, p.error, p.log, p.since
FROM process p LEFT JOIN run r ON r.id = p.run_id
WHERE p.run_id IS NULL OR p.run_id IN (SELECT id FROM run WHERE {UNFINISHED}
  UNION ALL SELECT max(id) FROM run)"""
"""The workers of the runs that are not finished, and of the newest run; the gateway's `run` is NULL."""
WORKERS_FIRST = "kind = 'trainer' DESC, kind, name"
EVENTS = """
SELECT id, at, run, kind, ref, data FROM event"""
