"""The states of a worker and the transitions between them (design, section 4).

Owner of: the table. Invariants: pure; a pair that is not in the table is an error.
"""

from __future__ import annotations

from typing import Literal

State = Literal["stopped", "starting", "ready", "busy", "draining", "backoff", "broken"]

TRANSITIONS: dict[State, frozenset[State]] = {
    "stopped": frozenset({"starting"}),
    "starting": frozenset({"ready", "draining", "backoff"}),
    "ready": frozenset({"busy", "draining", "backoff"}),
    "busy": frozenset({"ready", "draining", "backoff"}),
    "draining": frozenset({"stopped", "backoff"}),
    "backoff": frozenset({"starting", "broken", "stopped"}),
    "broken": frozenset({"starting", "stopped"}),
}


class IllegalTransition(Exception):
    """A worker was to go from one state to another that does not follow it."""


def follow(name: str, state: State, to: State) -> State:
    """`to`, when it may follow `state`; raises IllegalTransition."""
    if to not in TRANSITIONS[state]:
        raise IllegalTransition(f"worker {name!r}: {state} -> {to} is not in the transition table")
    return to
