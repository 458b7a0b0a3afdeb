"""Names the states of a worker; `artd.core.states` holds the transitions between them under `process`.

Pure; a transition that is not in that table is an error. Table `process` has one more state: a ready trainer with a job
is `busy`, which the dispatcher sets in the transaction of the claim.
"""

from __future__ import annotations

from typing import Literal

from artd.core.states import check

State = Literal["stopped", "starting", "ready", "draining", "backoff", "broken"]


def follow(state: State, to: State) -> State:
    """Return `to` if it may follow `state`. Raises artd.core.states.IllegalTransition."""
    check("process", state, to)
    return to
