"""Finds out how this engine can receive a live push, once it serves. There is no torch, because the harness imports this."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from artd_schema.run.spec import RunSpec
from artd_schema.wire.direct import TABLE, EngineTable
from artd_schema.wire.worker import Transfer
from artd_workers.deadline import Deadline
from artd_workers.transfer.atomic_file import write_whole

from .adapter import Adapter

_ASK_S = 60.0
_STOCK: dict[bool, tuple[Transfer, ...]] = {True: ("stock",), False: ()}


def table_of(adapter: Adapter, spec: RunSpec, device: Literal["cpu", "cuda"], folder: Path) -> EngineTable | None:
    """Return the tensors that the engine's kernels read, and write them to the file `table` for the trainer.

    Returns None where no push needs them. Raises EngineError.
    """
    if device == "cpu" or spec.rollout_weights_mode != "merged":
        return None
    table = adapter.direct_table(Deadline(_ASK_S))
    write_whole(folder / TABLE, msgspec.msgpack.encode(table))  # a trainer may be reading it
    return table


def transfers_of(spec: RunSpec, table: EngineTable | None, own: bool) -> tuple[tuple[Transfer, ...], str]:
    """Return the transfers for a live push, best first, and the obstacle to the wanted one ("" = none, or not asked).

    `own`: whether artd can push by the engine's own calls (`Capabilities.own_transfer`). Without any transfer, pushes come from
    disk.
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
