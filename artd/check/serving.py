"""Promises about pushes and served checkpoints: engines serve only committed checkpoints, each under its own name.

`invariant` says how to read a query.
"""

from __future__ import annotations

from .invariant import Invariant

SERVING = (
    Invariant(
        "push.checkpoint",
        "a push is of a checkpoint of its run, in the run's mode; while it is not over the checkpoint is not retired",
        "SELECT p.id AS push, p.state, p.run_id AS run, p.mode, k.id AS checkpoint, k.run_id AS checkpoint_run,"
        " k.state AS checkpoint_state FROM push p JOIN checkpoint k ON k.id = p.checkpoint_id JOIN run r ON r.id = p.run_id"
        " WHERE k.run_id <> p.run_id OR CASE WHEN json_valid(CAST(r.spec AS TEXT))"
        " THEN p.mode <> json_extract(CAST(r.spec AS TEXT), '$.rollout_weights_mode') END"
        " OR (p.state IN ('prepared', 'sending', 'live') AND k.state <> 'committed')",
    ),
    Invariant(
        "push.fence",
        "a push that was sent has a source (and a transfer when that is live), a start and a fence of its own, none above the"
        " last one given out",
        "SELECT id AS push, state, source, started, fence FROM push WHERE state IN ('sending', 'live')"
        " AND (source IS NULL OR (source = 'live') <> (transfer IS NOT NULL) OR started IS NULL OR fence < 1) UNION ALL"
        " SELECT max(id), 'shares its fence', NULL, NULL, fence FROM push WHERE fence > 0 GROUP BY fence HAVING count(*) > 1"
        " UNION ALL SELECT id, 'above the last fence', NULL, NULL, fence FROM push WHERE fence >"
        " coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'push_fence'), 0)",
    ),
    Invariant(
        "push.ended",
        "a push has ended exactly when it is superseded or failed",
        "SELECT id AS push, state, ended FROM push WHERE (ended IS NULL) = (state IN ('superseded', 'failed'))",
    ),
    Invariant(
        "push.live",
        "an engine has a live push exactly when it serves something, and holds that push's checkpoint",
        "SELECT p.engine, p.id AS push, p.checkpoint_id AS checkpoint, NULL AS serving FROM push p WHERE p.state = 'live'"
        " AND NOT EXISTS (SELECT 1 FROM serving s WHERE s.engine = p.engine AND s.checkpoint_id = p.checkpoint_id"
        " AND s.state <> 'gone') UNION ALL SELECT s.engine, NULL, s.checkpoint_id, s.id FROM serving s"
        " WHERE s.state = 'live' AND NOT EXISTS (SELECT 1 FROM push p WHERE p.engine = s.engine AND p.state = 'live')",
    ),
    Invariant(
        "serving.checkpoint",
        "what is served is a committed checkpoint of that run, under the name RUN@STEP",
        "SELECT s.id AS serving, s.name, s.state, r.name AS run, k.step, k.state AS checkpoint_state,"
        " k.run_id = s.run_id AS of_this_run FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id"
        " JOIN run r ON r.id = s.run_id WHERE k.run_id <> s.run_id OR s.name <> r.name || '@' || k.step"
        " OR (s.state <> 'gone' AND k.state <> 'committed')",
    ),
    Invariant(
        "serving.left",
        "requests enter no step that a rollback left",
        "SELECT s.id AS serving, s.name, k.id AS checkpoint, k.lineage FROM serving s JOIN checkpoint k"
        " ON k.id = s.checkpoint_id WHERE s.state = 'live' AND k.abandoned",
    ),
    Invariant(
        "serving.engine",
        "what is served is served by the newest process of its engine",
        "SELECT s.id AS serving, s.engine, s.spawn, p.spawn AS newest_spawn FROM serving s"
        " LEFT JOIN process p ON p.name = s.engine WHERE s.state <> 'gone' AND s.spawn IS NOT p.spawn",
    ),
    Invariant(
        "meta.instance",
        "a folder with a run has an instance and has been started",
        "SELECT instance, boot FROM (SELECT (SELECT value FROM meta WHERE key = 'instance') AS instance,"
        " (SELECT value FROM meta WHERE key = 'boot') AS boot) WHERE EXISTS (SELECT 1 FROM run)"
        " AND (coalesce(length(instance), 0) <> 32 OR coalesce(CAST(boot AS INTEGER), 0) < 1)",
    ),
    Invariant(
        "json",
        "columns that hold JSON can be read",
        "SELECT 'trajectory ' || trajectory_id AS row, 'metrics' AS column FROM trajectory_data"
        " WHERE NOT json_valid(CAST(metrics AS TEXT))"
        " UNION ALL SELECT 'job ' || id, 'metrics' FROM job WHERE NOT json_valid(CAST(metrics AS TEXT))"
        " UNION ALL SELECT 'job ' || id, 'seconds' FROM job WHERE NOT json_valid(CAST(seconds AS TEXT))"
        " UNION ALL SELECT 'push ' || id, 'seconds' FROM push WHERE NOT json_valid(CAST(seconds AS TEXT))"
        " UNION ALL SELECT 'event ' || id, 'data' FROM event WHERE NOT json_valid(CAST(data AS TEXT))",
    ),
)
