"""The warm-up of an engine's kernels, between its server's start and Ready.

Purpose: `Adapter.warm` where it pays, told in the harness's log with its seconds. Owner of: no state. Invariant: only time hangs on it,
so whatever fails here leaves an engine that serves.
"""

from __future__ import annotations

from collections.abc import Callable

from artd_schema.direct import EngineTable
from artd_workers.deadline import Deadline

from .adapter import Adapter

WARM_S = 120.0
"""At most. What was compiled once is read from Triton's cache at every later start on this machine."""
_COMPILED = "TRITON"


def pays(table: EngineTable | None) -> bool:
    """Whether the engine has kernels that are compiled when a step first needs them. table: see `transfers.table_of`."""
    return table is not None and table.moe_backend == _COMPILED


def warm(adapter: Adapter, deadline: Deadline, log: Callable[[str], None]) -> None:
    """Never raises."""
    try:
        done = adapter.warm(deadline)
        log("warm-up in {seconds:.1f} s: {run:.0f} of {forms:.0f} forms of the experts' kernel, "
            "{kernels:.0f} kernels compiled or read from Triton's cache".format(**done))  # fmt: skip
    except Exception as error:  # a defect of ours, too, must not end an engine that can serve
        log(f"no warm-up, so steps of a new size will wait for a compiler: {type(error).__name__}: {error}")
