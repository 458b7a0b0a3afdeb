"""How this engine can take a live push, found out once it serves.

Owner of: the file `table` in the spawn's folder, for the trainer. No torch: the harness imports this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from artd_schema.direct import TABLE, EngineTable
from artd_schema.spec import RunSpec
from artd_schema.worker import Transfer
from artd_workers.deadline import Deadline
from artd_workers.transfer.atomic_file import write_whole

from .adapter import Adapter

_ASK_S = 60.0
_STOCK: dict[bool, tuple[Transfer, ...]] = {True: ("stock",), False: ()}


def table_of(adapter: Adapter, spec: RunSpec, device: Literal["cpu", "cuda"], folder: Path) -> EngineTable | None:
    """What the engine's kernels read, also written for a trainer; None where nobody asks. Raises EngineError."""
    if device == "cpu" or spec.rollout_weights_mode != "merged":
        return None
    table = adapter.direct_table(Deadline(_ASK_S))
    write_whole(folder / TABLE, msgspec.msgpack.encode(table))  # a trainer may be looking
    return table


def transfers_of(spec: RunSpec, table: EngineTable | None, own: bool) -> tuple[tuple[Transfer, ...], str]:
    """Return the ways of a live push, best first, and what stands against the wanted one ("": nothing, or nobody asks).

    `own` says whether artd can push by the engine's own calls (`Capabilities.own_transfer`). Without any way, pushes come from disk.
    """
    if table is None:
        return ("gloo",), ""
    if table.obstacles:
        first, others = table.obstacles[0], len(table.obstacles) - 1
        return _STOCK[own], f"{first.where}: {first.why}" + (f" (and {others} more)" if others else "")
    if spec.engine.transfer == "stock":
        return _STOCK[own], "" if own else f"{table.engine} {table.version} takes no push by its own calls from artd"
    ways: tuple[Transfer, ...] = ("nccl",) if spec.engine.transfer == "nccl" else ("direct", "nccl")
    return ways + _STOCK[own], ""
