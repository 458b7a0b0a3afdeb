"""Applies the rule book (`artd_schema.data.rules`) for ingest: a finding becomes an `InvalidField`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from artd.columns import SCAN
from artd_schema.data.rules import trajectory_finding
from artd_schema.data.trajectory import RouteShape, Turn

from .fields import InvalidField


def check_turns(
    turns: Sequence[Turn],
    vocab_size: int,
    trained: bool,
    next_epoch: int | None = None,
    routes: RouteShape | None = None,
) -> int:
    """Check a trajectory's turns and return the number of its sampled tokens.

    `next_epoch` is the first unknown policy epoch; None skips that check, for engines that artd does not run. `routes`
    is the shape of the run's routes, None if it replays no experts. Raises InvalidField.
    """
    found = trajectory_finding(turns, trained, routes, vocab_size, next_epoch, SCAN)
    if found:
        raise InvalidField(found.where, found.what)
    return sum(len(turn.token_ids) for turn in turns) // 4
