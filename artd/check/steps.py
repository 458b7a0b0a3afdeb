"""Promises about runs, jobs, attempts and checkpoints: a step exists exactly when its checkpoint is committed, and steps form
one chain.

`invariant` says how to read a query. `run` adds the function `checkpoint_dir` to SQL.
"""

from __future__ import annotations

from artd.retention.checkpoints import NEEDED

from .invariant import Invariant

UNFINISHED = "('queued', 'running', 'quarantined')"

STEPS = (
    Invariant(
        "run.step",
        "a run's step is that of its newest checkpoint, which is the last of its chain; no checkpoint is of a later lineage",
        "SELECT r.id AS run, r.step, r.lineage, r.checkpoint_id AS checkpoint, k.step AS checkpoint_step,"
        " k.abandoned, (SELECT max(n.step) FROM checkpoint n WHERE n.run_id = r.id AND n.abandoned = 0) AS newest,"
        " (SELECT max(n.lineage) FROM checkpoint n WHERE n.run_id = r.id) AS newest_lineage FROM run r"
        " LEFT JOIN checkpoint k ON k.id = r.checkpoint_id AND k.run_id = r.id WHERE r.step <> coalesce(k.step, -1)"
        " OR r.step <> coalesce(newest, -1) OR k.abandoned OR newest_lineage > r.lineage",
    ),
    Invariant(
        "run.pause",
        "a run is paused exactly while it has a cause for it",
        "SELECT r.id AS run, r.state, count(p.id) AS causes FROM run r LEFT JOIN pause p ON p.run_id = r.id GROUP BY r.id"
        " HAVING (r.state = 'paused') <> (count(p.id) > 0)",
    ),
    Invariant(
        "run.epochs",
        "every policy epoch of a run is below the next one to give out, and is one job's alone",
        "SELECT r.id AS run, r.next_epoch, j.id AS job, j.epoch FROM job j JOIN run r ON r.id = j.run_id"
        " WHERE j.epoch NOT BETWEEN 0 AND r.next_epoch - 1 UNION ALL"
        " SELECT run_id, 'used twice', max(id), epoch FROM job GROUP BY run_id, epoch HAVING count(*) > 1",
    ),
    Invariant(
        "job.order",
        "a run has one unfinished job at most, and it makes the run's next step",
        "SELECT r.id AS run, r.step, count(*) AS unfinished, max(j.id) AS job, max(j.step) AS job_step FROM job j"
        f" JOIN run r ON r.id = j.run_id WHERE j.state IN {UNFINISHED} GROUP BY r.id"
        " HAVING count(*) > 1 OR max(j.step) <> r.step + 1",
    ),
    Invariant(
        "job.checkpoint",
        "a job has one checkpoint when it succeeded, and none otherwise",
        "SELECT j.id AS job, j.state, count(k.id) AS checkpoints FROM job j LEFT JOIN checkpoint k ON k.job_id = j.id"
        " GROUP BY j.id HAVING count(k.id) <> (j.state = 'succeeded')",
    ),
    Invariant(
        "job.result",
        "a checkpoint has the run, step, epoch and parent of its job",
        "SELECT k.id AS checkpoint, k.run_id AS run, k.step, k.epoch, k.parent_id AS parent, j.id AS job,"
        " j.run_id AS job_run, j.step AS job_step, j.epoch AS job_epoch, j.parent_id AS job_parent FROM checkpoint k"
        " JOIN job j ON j.id = k.job_id WHERE (k.run_id, k.step, k.epoch) <> (j.run_id, j.step, j.epoch)"
        " OR k.parent_id IS NOT j.parent_id",
    ),
    Invariant(
        "job.parent",
        "a train job goes on from the checkpoint of its run one step before, an unfinished one from the newest; an init job"
        " makes step 0 from none",
        "SELECT j.id AS job, j.kind, j.step, k.id AS parent, k.step AS parent_step, k.run_id AS parent_run,"
        " r.checkpoint_id AS newest FROM job j JOIN run r ON r.id = j.run_id LEFT JOIN checkpoint k ON k.id = j.parent_id"
        " WHERE CASE j.kind WHEN 'init' THEN j.step <> 0 OR j.parent_id IS NOT NULL"
        " ELSE k.id IS NULL OR k.step <> j.step - 1 OR k.run_id <> j.run_id END"
        f" OR (j.state IN {UNFINISHED} AND j.parent_id IS NOT r.checkpoint_id)",
    ),
    Invariant(
        "job.cancel",
        "a job that was told to stop runs still, or is cancelled; one that was not is not",
        "SELECT id AS job, state, cancel FROM job WHERE cancel <> (state = 'cancelled') AND (NOT cancel OR state <> 'running')",
    ),
    Invariant(
        "job.worker",
        "a running job is done by a process that its worker has or had",
        "SELECT j.id AS job, j.worker, j.spawn, p.spawn AS newest_spawn FROM job j LEFT JOIN process p ON p.name = j.worker"
        " WHERE j.state = 'running' AND (p.name IS NULL OR j.spawn IS NULL OR j.spawn > p.spawn)",
    ),
    Invariant(
        "attempt.open",
        "an attempt is open exactly while its job runs under its fence, with the same worker and process",
        "SELECT j.id AS job, j.state, j.fence, j.worker, j.spawn, a.fence AS attempt_fence, a.worker AS attempt_worker,"
        " a.spawn AS attempt_spawn FROM job j LEFT JOIN attempt a ON a.job_id = j.id AND a.fence = j.fence AND a.ended IS NULL"
        " WHERE j.state = 'running' AND (a.job_id IS NULL OR a.worker IS NOT j.worker OR a.spawn IS NOT j.spawn)"
        " UNION ALL SELECT j.id, j.state, j.fence, j.worker, j.spawn, a.fence, a.worker, a.spawn FROM attempt a"
        " JOIN job j ON j.id = a.job_id WHERE a.ended IS NULL AND (j.state <> 'running' OR a.fence <> j.fence)",
    ),
    Invariant(
        "attempt.outcome",
        "an attempt that ended has an outcome; one succeeded exactly when its job did, under the job's last fence",
        "SELECT j.id AS job, j.state, j.fence, a.fence AS attempt_fence, a.ended, a.outcome FROM attempt a"
        " JOIN job j ON j.id = a.job_id WHERE (a.ended IS NULL) <> (a.outcome IS NULL) OR (a.outcome = 'succeeded'"
        " AND (j.state <> 'succeeded' OR a.fence <> j.fence)) UNION ALL SELECT j.id, j.state, j.fence, NULL, NULL,"
        " 'no attempt succeeded' FROM job j WHERE j.state = 'succeeded' AND NOT EXISTS (SELECT 1 FROM attempt a"
        " WHERE a.job_id = j.id AND a.fence = j.fence AND a.outcome = 'succeeded')",
    ),
    Invariant(
        "attempt.fence",
        "no attempt has a fence above its job's",
        "SELECT j.id AS job, j.fence, a.fence AS attempt_fence FROM attempt a JOIN job j ON j.id = a.job_id"
        " WHERE a.fence > j.fence OR a.fence < 1",
    ),
    Invariant(
        "checkpoint.parent",
        "a checkpoint's parent is of its run, one step before, in no later lineage, with an older epoch; step 0 has none",
        "SELECT k.id AS checkpoint, k.step, k.epoch, k.lineage, p.id AS parent, p.step AS parent_step,"
        " p.epoch AS parent_epoch, p.lineage AS parent_lineage FROM checkpoint k LEFT JOIN checkpoint p"
        " ON p.id = k.parent_id WHERE CASE k.step WHEN 0 THEN k.parent_id IS NOT NULL ELSE p.id IS NULL"
        " OR p.run_id <> k.run_id OR p.step <> k.step - 1 OR p.lineage > k.lineage OR p.epoch >= k.epoch END",
    ),
    Invariant(
        "checkpoint.chain",
        "what a run's chain goes on from is of the chain too; only a rollback, which opens a lineage, leaves a checkpoint",
        "SELECT k.id AS checkpoint, k.step, k.lineage, k.abandoned, p.abandoned AS parent_abandoned, r.lineage AS newest"
        " FROM checkpoint k JOIN run r ON r.id = k.run_id LEFT JOIN checkpoint p ON p.id = k.parent_id"
        " WHERE k.abandoned < p.abandoned OR (k.abandoned AND k.lineage >= r.lineage)",
    ),
    Invariant(
        "checkpoint.dir",
        "a checkpoint's folder is named by its run, lineage, step, job and fence, and belongs to it alone",
        "SELECT k.id AS checkpoint, k.dir, checkpoint_dir(r.name, k.lineage, k.step, k.job_id, j.fence) AS expected"
        " FROM checkpoint k JOIN run r ON r.id = k.run_id JOIN job j ON j.id = k.job_id WHERE k.dir <> expected"
        " UNION ALL SELECT max(id), dir, 'a folder of its own' FROM checkpoint GROUP BY dir HAVING count(*) > 1",
    ),
    Invariant(
        "checkpoint.needed",
        "the newest checkpoint of a run and whatever is trained from, pushed or served is not retired",
        f"SELECT id AS checkpoint, step, state FROM checkpoint WHERE state = 'retired' AND id IN ({NEEDED})",
    ),
    Invariant(
        "checkpoint.event",
        "a step that the event log tells of is committed",
        "SELECT id AS event, run, ref AS step, json_extract(CAST(data AS TEXT), '$.sha') AS sha FROM event"
        " WHERE kind = 'step.committed' AND json_extract(CAST(data AS TEXT), '$.sha') NOT IN (SELECT sha FROM checkpoint)",
    ),
    Invariant(
        "metric.step",
        "metrics are of committed steps",
        "SELECT DISTINCT run_id AS run, lineage, step FROM metric"
        " WHERE (run_id, lineage, step) NOT IN (SELECT run_id, lineage, step FROM checkpoint)",
    ),
)
