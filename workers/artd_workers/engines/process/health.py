"""Whether a server that lives still has its engine: it is asked again and again.

Purpose: an API server may outlive its engine, and never end while it owes somebody an answer that only the engine could give.
Owner of: no state. Invariants: what counts is a server that says no, or has nobody to say it, several times in a row; one that
is busy or stopped says nothing, and is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from artd_workers.engines.adapter import EngineError, EngineTimeout

LOOK_S = 1.0
LOOKS = 3
"""Refusals in a row that count: an engine that was ended for one could have served."""


def lost(ask: Callable[[], None], over: threading.Event, every_s: float = LOOK_S) -> str:
    """Why the engine is lost; returns "" once `over` is set. ask: raises EngineError unless the server says that it can serve."""
    refusals = 0
    while not over.wait(every_s):
        refused = _refusal(ask)
        refusals = refusals + 1 if refused else 0
        if refusals == LOOKS:
            return refused
    return ""


def _refusal(ask: Callable[[], None]) -> str:
    try:
        ask()
    except EngineTimeout:
        return ""
    except EngineError as error:
        return str(error)
    return ""
