"""The states of a worker to its supervisor; which may follow which is in `artd.core.states` under `process`.

Owner of: no state. Invariants: pure; a pair that is not in the table is an error. In table `process` a ready trainer with a job is
`busy` besides: that is the dispatcher's word, in the transaction of the claim.
"""

from __future__ import annotations

from typing import Literal

from artd.core.states import check

State = Literal["stopped", "starting", "ready", "draining", "backoff", "broken"]


def follow(state: State, to: State) -> State:
    """`to`, when it may follow `state`. Errors: artd.core.states.IllegalTransition."""
    check("process", state, to)
    return to
