"""Asks a running server again and again whether it still has its engine.

An API server may outlive its engine, and may never end while it owes an answer that only the engine could give. Several
refusals in a row count as a loss. A server that is busy or stopped does not answer, and is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from artd_workers.engines.adapter import EngineError, EngineTimeout

LOOK_S = 1.0
LOOKS = 3
"""So many refusals in a row count as a loss; after a single one the engine may still serve."""


def await_loss(ask: Callable[[], None], over: threading.Event, every_s: float = LOOK_S) -> str:
    """Return why the engine is lost, or "" once `over` is set. `ask` raises EngineError unless the server says that it can
    serve."""
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
