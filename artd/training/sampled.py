"""Counts what was sampled since the last step, trained or not, for the metrics of the step that is committed now.

Each sealed group and each evaluation is counted once, in the first step that is committed after it. The functions run
in that step's transaction, so a step that is not committed counts nothing.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence

from artd.tables.groups import mark_told
from artd.tables.runs import note_evaluations

_GROUPS = """
SELECT g.state, g.reason, count(*) AS size, min(t.reward) AS low, max(t.reward) AS high, total(t.reward) AS sum
FROM trajectory_group g JOIN trajectory t ON t.group_id = g.id
WHERE g.run_id = :run AND g.told = 0 AND g.state IN ('sealed', 'packed', 'trained', 'discarded') AND g.split = 'train' GROUP BY g.id"""
_SPREAD = """
SELECT total((t.reward - :mean) * (t.reward - :mean)) FROM trajectory_group g JOIN trajectory t ON t.group_id = g.id
WHERE g.run_id = :run AND g.told = 0 AND g.state IN ('sealed', 'packed', 'trained', 'discarded') AND g.split = 'train'"""
_EVAL = """
SELECT max(id) AS newest, count(*) AS count, avg(reward) AS mean FROM trajectory
WHERE run_id = :run AND id > :told AND split = 'eval'"""


def since_last_step(c: sqlite3.Connection, run_id: int) -> dict[str, float]:
    """Return the metrics by name (docs/metrics.md) and mark what was counted, so that no later step counts it again."""
    groups = c.execute(_GROUPS, {"run": run_id}).fetchall()
    found = {
        "groups_sealed": float(len(groups)),
        "groups_discarded": float(sum(group["state"] == "discarded" for group in groups)),
    }
    count = sum(group["size"] for group in groups)
    if count:
        found |= _rewards(groups, count)
        (spread,) = c.execute(_SPREAD, {"run": run_id, "mean": found["sampled_reward_mean"]}).fetchone()
        found["sampled_reward_std"] = math.sqrt(spread / count)
    mark_told(c, run_id)
    return {name: value for name, value in (found | _evaluations(c, run_id)).items() if math.isfinite(value)}


def _rewards(groups: Sequence[sqlite3.Row], count: int) -> dict[str, float]:
    found = {
        "sampled_trajectories": float(count),
        "sampled_reward_mean": math.fsum(group["sum"] / count for group in groups),
    }
    gone = [group for group in groups if group["state"] == "discarded"]
    if inside := sum(group["size"] for group in gone):
        found["discarded_reward_mean"] = math.fsum(group["sum"] / inside for group in gone)
    low, high = min(group["low"] for group in groups), max(group["high"] for group in groups)
    if low < high:
        several = [group for group in groups if group["size"] > 1]
        found["groups_all_best"] = float(sum(group["low"] == high for group in several))
        found["groups_all_worst"] = float(sum(group["high"] == low for group in several))
    return found


def _evaluations(c: sqlite3.Connection, run_id: int) -> dict[str, float]:
    (told,) = c.execute("SELECT told FROM run WHERE id = ?", (run_id,)).fetchone()
    row = c.execute(_EVAL, {"run": run_id, "told": told}).fetchone()
    if not row["count"]:
        return {}
    note_evaluations(c, run_id, row["newest"])
    return {"eval_trajectories": float(row["count"]), "eval_reward_mean": row["mean"]}
