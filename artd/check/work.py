"""Promises about trajectories, groups, batches and the gateway's ledger: nothing is lost, and nothing is trained twice.

`invariant` says how to read a query.
"""

from __future__ import annotations

from .invariant import Invariant

WORK = (
    Invariant(
        "group.size",
        "a group's size is the number of its trajectories",
        "SELECT g.id AS trajectory_group, g.size, count(t.id) AS trajectories FROM trajectory_group g"
        " LEFT JOIN trajectory t ON t.group_id = g.id GROUP BY g.id HAVING g.size <> count(t.id)",
    ),
    Invariant(
        "group.count",
        "the numbers of groups and of their trajectories are counted right",
        "SELECT run_id AS run, split, state, groups, trajectories FROM (SELECT run_id, split, state, groups, trajectories"
        " FROM group_count WHERE groups <> 0 OR trajectories <> 0 UNION ALL SELECT run_id, split, state, count(*), sum(size)"
        " FROM trajectory_group GROUP BY run_id, split, state) GROUP BY run_id, split, state, groups, trajectories"
        " HAVING count(*) <> 2",
    ),
    Invariant(
        "group.members",
        "a trajectory is of its group's run and split",
        "SELECT t.id AS trajectory, t.run_id AS run, t.split, g.id AS trajectory_group, g.run_id AS group_run,"
        " g.split AS group_split FROM trajectory t JOIN trajectory_group g ON g.id = t.group_id"
        " WHERE t.run_id <> g.run_id OR t.split <> g.split",
    ),
    Invariant(
        "group.state",
        "trajectories of an open group wait; of a sealed one they wait or are discarded; of a packed, trained or discarded"
        " one they are that, or discarded",
        "SELECT t.id AS trajectory, t.state, g.id AS trajectory_group, g.state AS group_state FROM trajectory t"
        " JOIN trajectory_group g ON g.id = t.group_id WHERE NOT (CASE g.state WHEN 'open' THEN t.state = 'queued'"
        " WHEN 'sealed' THEN t.state IN ('queued', 'discarded') ELSE t.state IN (g.state, 'discarded') END)",
    ),
    Invariant(
        "group.kept",
        "a packed or trained group has a packed or trained trajectory, all of them in one batch",
        "SELECT g.id AS trajectory_group, g.state, count(t.id) AS trajectories, count(DISTINCT t.batch_id) AS batches"
        " FROM trajectory_group g LEFT JOIN trajectory t ON t.group_id = g.id AND t.state = g.state"
        " WHERE g.state IN ('packed', 'trained') GROUP BY g.id HAVING count(DISTINCT t.batch_id) <> 1",
    ),
    Invariant(
        "trajectory.batch",
        "a packed or trained trajectory has one batch, of its run, which is packed or trained as well; any other has none,"
        " or an abandoned one",
        "SELECT t.id AS trajectory, t.state, t.run_id AS run, b.id AS batch, b.state AS batch_state, b.run_id AS batch_run"
        " FROM trajectory t LEFT JOIN batch b ON b.id = t.batch_id WHERE CASE t.state"
        " WHEN 'queued' THEN t.batch_id IS NOT NULL WHEN 'discarded' THEN b.state <> 'abandoned' OR b.run_id <> t.run_id"
        " ELSE b.id IS NULL OR b.state <> t.state OR b.run_id <> t.run_id END",
    ),
    Invariant(
        "trajectory.payload",
        "a trajectory has one row of data; a body that is kept is there or in a file, and one that has expired in neither",
        "SELECT t.id AS trajectory, t.payload, t.blob, d.trajectory_id AS data, d.body IS NOT NULL AS body FROM trajectory t"
        " LEFT JOIN trajectory_data d ON d.trajectory_id = t.id WHERE d.trajectory_id IS NULL"
        " OR (d.body IS NOT NULL) + (t.blob IS NOT NULL) <> (t.payload = 'kept')",
    ),
    Invariant(
        "trajectory.epochs",
        "policy epochs are both known or both unknown, and in order",
        "SELECT id AS trajectory, epoch_min, epoch_max FROM trajectory WHERE (epoch_min IS NULL) <> (epoch_max IS NULL)"
        " OR epoch_min > epoch_max OR epoch_min < 0",
    ),
    Invariant(
        "trajectory.served",
        "a trajectory of artd's own engine has policy epochs that its run had given out",
        "SELECT t.id AS trajectory, t.epoch_max, r.next_epoch FROM trajectory t JOIN run r ON r.id = t.run_id"
        " WHERE t.epoch_max >= r.next_epoch AND EXISTS (SELECT 1 FROM exchange e WHERE e.trajectory_id = t.id)",
    ),
    Invariant(
        "trajectory.blob",
        "a body in a file is named by its digest, and is a trajectory's",
        "SELECT t.id AS trajectory, t.digest, t.blob, f.kind FROM trajectory t LEFT JOIN blob f ON f.sha = t.blob"
        " WHERE t.blob IS NOT NULL AND (t.blob <> t.digest OR f.kind <> 'trajectory')",
    ),
    Invariant(
        "trajectory.metadata",
        "metadata in a file goes with the body, and is a trajectory's",
        "SELECT t.id AS trajectory, t.payload, d.metadata, f.kind FROM trajectory_data d JOIN trajectory t ON t.id = d.trajectory_id"
        " LEFT JOIN blob f ON f.sha = d.metadata WHERE d.metadata IS NOT NULL AND (t.payload <> 'kept' OR f.kind <> 'metadata')",
    ),
    Invariant(
        "exchange.use",
        "a used exchange belongs to a trajectory of its run and split",
        "SELECT e.id AS exchange, e.run_id AS run, e.split, t.id AS trajectory, t.run_id AS trajectory_run,"
        " t.split AS trajectory_split FROM exchange e JOIN trajectory t ON t.id = e.trajectory_id"
        " WHERE e.trajectory_id IS NOT NULL AND (e.run_id <> t.run_id OR e.split <> t.split)",
    ),
    Invariant(
        "exchange.rollout",
        "a response is of its rollout's run, and so is a rollout's trajectory",
        "SELECT e.id AS exchange, e.run_id AS run, e.delivery, o.id AS rollout, o.run_id AS rollout_run FROM exchange e"
        " JOIN rollout o ON o.id = e.rollout_id WHERE e.run_id <> o.run_id"
        " UNION ALL SELECT NULL, t.run_id, NULL, o.id, o.run_id FROM rollout o JOIN trajectory t ON t.id = o.trajectory_id"
        " WHERE t.run_id <> o.run_id",
    ),
    Invariant(
        "exchange.count",
        "the responses that no trajectory was made of are counted right",
        "SELECT id AS exchange_count, unused, bytes FROM exchange_count WHERE (unused, bytes) <> (SELECT count(*),"
        " coalesce(sum(coalesce(length(e.turn), b.bytes)), 0) FROM exchange e LEFT JOIN blob b ON b.sha = e.blob"
        " WHERE e.trajectory_id IS NULL)",
    ),
    Invariant(
        "batch.job",
        "a batch has one job, of its run and step: packed while the job is unfinished, trained when it succeeded, abandoned"
        " when it was cancelled",
        "SELECT b.id AS batch, b.state, b.step, j.id AS job, j.state AS job_state, j.step AS job_step, j.run_id AS job_run"
        " FROM batch b LEFT JOIN job j ON j.batch_id = b.id WHERE j.id IS NULL OR j.run_id <> b.run_id OR j.step <> b.step"
        " OR b.state <> CASE j.state WHEN 'succeeded' THEN 'trained' WHEN 'cancelled' THEN 'abandoned' ELSE 'packed' END"
        " UNION ALL SELECT batch_id, 'more than one job', NULL, max(id), NULL, NULL, NULL FROM job"
        " WHERE batch_id IS NOT NULL GROUP BY batch_id HAVING count(*) > 1",
    ),
    Invariant(
        "batch.blobs",
        "a batch's files are of their kinds",
        "SELECT b.id AS batch, t.kind AS tensors, m.kind AS manifest, r.kind AS replay, x.kind AS replay_manifest"
        " FROM batch b LEFT JOIN blob t ON t.sha = b.tensors LEFT JOIN blob m ON m.sha = b.manifest"
        " LEFT JOIN blob r ON r.sha = b.replay LEFT JOIN blob x ON x.sha = b.replay_manifest"
        " WHERE t.kind <> 'batch' OR m.kind <> 'manifest' OR r.kind <> 'replay' OR x.kind <> 'manifest'",
    ),
    Invariant(
        "batch.replay",
        "a batch has a replay bundle exactly when its run replays experts, covering no more tokens than it has",
        "SELECT b.id AS batch, b.replay_manifest, b.covered, b.tokens, length(r.routes) > 0 AS run_replays FROM batch b"
        " JOIN run r ON r.id = b.run_id WHERE (b.replay_manifest IS NOT NULL) <> (length(r.routes) > 0)"
        " OR b.covered NOT BETWEEN 0 AND b.tokens",
    ),
)
