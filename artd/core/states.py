"""Transition tables: which state may follow which, for every entity that has states.

Pure data and functions. A transition that is not in its table raises, wherever it is tried. The CHECKs of the SQL
schema list the same states.
"""

from __future__ import annotations

TRANSITIONS: dict[str, frozenset[tuple[str, str]]] = {
    "run": frozenset({("active", "paused"), ("paused", "active"), ("active", "finished"), ("paused", "finished")}),
    "trajectory_group": frozenset(
        {
            ("open", "sealed"),
            ("open", "discarded"),
            ("sealed", "packed"),
            ("sealed", "discarded"),
            ("packed", "trained"),
            ("packed", "sealed"),
            ("packed", "discarded"),
        }
    ),
    "trajectory": frozenset(
        {
            ("queued", "packed"),
            ("packed", "trained"),
            ("packed", "queued"),
            ("packed", "discarded"),
            ("queued", "discarded"),
        }
    ),
    "rollout": frozenset({("open", "submitted"), ("open", "expired")}),
    "batch": frozenset({("packed", "trained"), ("packed", "abandoned")}),
    "job": frozenset(
        {
            ("queued", "running"),
            ("running", "succeeded"),
            ("running", "queued"),
            ("running", "quarantined"),
            ("running", "cancelled"),
            ("queued", "cancelled"),
            ("quarantined", "queued"),
            ("quarantined", "cancelled"),
        }
    ),
    "checkpoint": frozenset({("committed", "retired")}),
    "push": frozenset(
        {
            ("prepared", "sending"),
            ("prepared", "superseded"),
            ("sending", "live"),
            ("sending", "prepared"),
            ("sending", "failed"),
            ("sending", "superseded"),
            ("live", "superseded"),
        }
    ),
    "serving": frozenset({("live", "draining"), ("live", "gone"), ("draining", "gone")}),
    "process": frozenset(
        {
            ("stopped", "starting"),
            ("starting", "ready"),
            ("ready", "busy"),
            ("busy", "ready"),
            ("draining", "stopped"),
            ("backoff", "starting"),
            ("backoff", "broken"),
            ("backoff", "stopped"),
            ("broken", "starting"),
            ("broken", "stopped"),
            *((state, "draining") for state in ("starting", "ready", "busy")),
            *((state, "backoff") for state in ("starting", "ready", "busy", "draining")),
        }
    ),
}


class IllegalTransition(Exception):
    """A state change that the tables do not allow, or of a row that is not in the expected state."""


def sources(entity: str, target: str) -> tuple[str, ...]:
    """Return the states from which `entity` may move to `target`. Raises IllegalTransition when there is none."""
    found = tuple(sorted(start for start, end in TRANSITIONS[entity] if end == target))
    if not found:
        raise IllegalTransition(f"{entity}: no state may move to {target!r}")
    return found


def check(entity: str, start: str, end: str) -> None:
    """Raise IllegalTransition if `entity` may not move from `start` to `end`."""
    if (start, end) not in TRANSITIONS[entity]:
        raise IllegalTransition(f"{entity}: {start!r} may not become {end!r}")
