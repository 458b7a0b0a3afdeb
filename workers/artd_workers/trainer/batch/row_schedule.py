"""Which rank trains which row, and what all ranks found together.

Purpose: ranks that hold copies of the attention take turns at the rows of a batch; `added` puts their findings together.
Owner of: no state. Invariants: all ranks have as many turns, since the experts of one rank work for the rows of all; a row counts
once, whoever else does it again to keep step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from artd_workers.trainer import tree_mask
from artd_workers.trainer.parallel import context
from artd_workers.trainer.parallel.layout import Parallel

from .rows import PackedRow


@dataclass(frozen=True)
class Turn:
    """A row as this rank trains it, with the trained tokens that are this rank's. index: of the row in the batch; first: how many
    trained tokens of the batch come before these; counts: False when it is done only to keep step (its weights are zero)."""

    index: int
    row: PackedRow
    first: int
    counts: bool = True


TRAINED = (
    "at", "targets", "old_logprobs", "advantages", "weights", "temperatures", "epochs", "trajectories", "segments",
    "sequences", "groups",
)  # fmt: skip
"""Fields of a row that hold something for each trained token."""


def turns(rows: Sequence[PackedRow], parallel: Parallel, device: torch.device) -> list[Turn]:
    """This rank's turns at a batch's rows, in order, with their rows on `device`. rows: on the CPU."""
    firsts = [0, *accumulate(len(row.at) for row in rows)]
    found, cuda = [], device.type == "cuda"
    for start in range(0, len(rows), parallel.replicas):
        here = start + (parallel_state.get_data_parallel_rank() // parallel.cp if parallel.replicas > 1 else 0)
        index, counts = min(here, len(rows) - 1), here < len(rows)
        row = rows[index] if counts else replace(rows[index], weights=torch.zeros_like(rows[index].weights))
        if parallel.ep > 1 and not cuda:
            # Megatron's exchange of tokens that a CPU can do wants as many from each.
            row = filled(row, max(len(one.tokens) for one in rows[start : start + parallel.replicas]))
        before = 0
        if parallel.cp > 1:
            row, before = trained_in(
                row, context.part_index(), context.tokens_per_rank(parallel, len(row.tokens), cuda)
            )
        found.append(Turn(index, row.to(device), firsts[index] + before, counts))
    return found


def trained_in(row: PackedRow, index: int, size: int) -> tuple[PackedRow, int]:
    """The row with the trained tokens alone whose predictors are in part `index`, parts of `size` tokens; how many come before."""
    before, behind = (int((row.at < size * end).sum()) for end in (index, index + 1))
    return replace(row, **{name: getattr(row, name)[before:behind] for name in TRAINED}), before


def filled(row: PackedRow, size: int) -> PackedRow:
    """The row with tokens behind it that see themselves only, and that nothing sees, up to `size`."""
    extra = size - len(row.tokens)
    if extra <= 0:
        return row
    tokens, positions = (F.pad(x, (0, extra)) for x in (row.tokens, row.positions))
    routes = None if row.routes is None else context.pad_routes(row.routes, size)
    return replace(row, tokens=tokens, positions=positions, until=tree_mask.fill(row.until, extra), routes=routes)


def added(found: Tensor, parallel: Parallel) -> Tensor:
    """Sum of what each rank found, on every rank; of ranks that share one row's products, and find the same, one counts."""
    if parallel.world == 1:
        return found
    if parallel_state.get_tensor_model_parallel_rank():
        found = torch.zeros_like(found)
    dist.all_reduce(found)
    return found
