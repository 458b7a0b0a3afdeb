"""Decides which rank trains which row, and sums what all ranks found.

Ranks with copies of the attention train different rows of a batch. All ranks get equally many rows, because the experts of one
rank work for the rows of all. A row counts once: a rank that has none left repeats one with zero weights, to stay in step.
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
class ScheduledRow:
    """A row as this rank trains it, with those of its trained tokens that belong to this rank.

    `index`: the row's number in the batch. `first`: how many trained tokens of the batch come before these. `counts`: False
    when the rank only stays in step (its weights are zero).
    """

    index: int
    row: PackedRow
    first: int
    counts: bool = True


TRAINED = (
    "at", "targets", "old_logprobs", "advantages", "weights", "temperatures", "epochs", "trajectories", "segments",
    "sequences", "groups",
)  # fmt: skip
"""The fields of a row that have one value for each trained token."""


def schedule_rows(rows: Sequence[PackedRow], parallel: Parallel, device: torch.device) -> list[ScheduledRow]:
    """Return the rows that this rank trains, in order and on `device`. `rows`: all rows of the batch, on the CPU."""
    firsts = [0, *accumulate(len(row.at) for row in rows)]
    found, cuda = [], device.type == "cuda"
    for start in range(0, len(rows), parallel.replicas):
        here = start + (parallel_state.get_data_parallel_rank() // parallel.cp if parallel.replicas > 1 else 0)
        index, counts = min(here, len(rows) - 1), here < len(rows)
        row = rows[index] if counts else replace(rows[index], weights=torch.zeros_like(rows[index].weights))
        if parallel.ep > 1 and not cuda:
            # Megatron's exchange of tokens on a CPU needs equally many from each rank.
            row = pad_row(row, max(len(one.tokens) for one in rows[start : start + parallel.replicas]))
        before = 0
        if parallel.cp > 1:
            row, before = cut_trained(
                row, context.part_index(), context.tokens_per_rank(parallel, len(row.tokens), cuda)
            )
        found.append(ScheduledRow(index, row.to(device), firsts[index] + before, counts))
    return found


def cut_trained(row: PackedRow, index: int, size: int) -> tuple[PackedRow, int]:
    """Keep only the trained tokens whose predictors are in part `index`, where a part has `size` tokens.

    Returns the row and how many of its trained tokens come before these.
    """
    before, behind = (int((row.at < size * end).sum()) for end in (index, index + 1))
    return replace(row, **{name: getattr(row, name)[before:behind] for name in TRAINED}), before


def pad_row(row: PackedRow, size: int) -> PackedRow:
    """Pad a row to `size` tokens. A padding token sees only itself, and no other token sees it."""
    extra = size - len(row.tokens)
    if extra <= 0:
        return row
    tokens, positions = (F.pad(x, (0, extra)) for x in (row.tokens, row.positions))
    routes = None if row.routes is None else context.pad_routes(row.routes, size)
    return replace(row, tokens=tokens, positions=positions, until=tree_mask.fill(row.until, extra), routes=routes)


def sum_over_ranks(found: Tensor, parallel: Parallel) -> Tensor:
    """Return the sum of what each rank found. Collective: every rank calls it.

    Of ranks that share one row's products, and so find the same, one counts.
    """
    if parallel.world == 1:
        return found
    if parallel_state.get_tensor_model_parallel_rank():
        found = torch.zeros_like(found)
    dist.all_reduce(found)
    return found
