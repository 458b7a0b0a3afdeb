"""Warms up an engine's kernels between its server's start and Ready, where that pays.

The harness's log shows the seconds. It only saves time later, so an engine whose warm-up fails serves anyway.
"""

from __future__ import annotations

from collections.abc import Callable

from artd_schema.wire.direct import EngineTable
from artd_workers.deadline import Deadline

from .adapter import Adapter

WARM_S = 120.0
"""The longest warm-up. Later starts on this machine read what was compiled from Triton's cache."""
_COMPILED = "TRITON"


def pays(table: EngineTable | None) -> bool:
    """Return whether the engine has kernels that are compiled when a step first needs them. `table`: from `transfers.table_of`."""
    return table is not None and table.moe_backend == _COMPILED


def warm(adapter: Adapter, deadline: Deadline, log: Callable[[str], None]) -> None:
    """Warm the engine up and log it. Never raises."""
    try:
        done = adapter.warm(deadline)
        log("warm-up in {seconds:.1f} s: {run:.0f} of {forms:.0f} forms of the experts' kernel, "
            "{kernels:.0f} kernels compiled or read from Triton's cache".format(**done))  # fmt: skip
    except Exception as error:  # not even a bug of artd's may end an engine that can serve
        log(f"no warm-up, so steps of a new size will wait for a compiler: {type(error).__name__}: {error}")
