"""A row whose tokens are shared out over ranks: each has a contiguous part, and its queries look at the keys of all.

Purpose: `gathered` brings keys and values together for an attention, and their gradients back; `own` says which part is whose.
Owner of: the group of the ranks that share this rank's rows. Invariants: parts are equally long and in the order of ranks; a
part's queries see what the row's mask lets them see, wherever it lies.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from .parallel import Parallel

_group: dist.ProcessGroup | None = None


def opened(parallel: Parallel) -> None:
    """Make the groups of a layout, on all ranks."""
    global _group
    _group = None
    if parallel.cp == 1:
        return
    here, near = dist.get_rank(), parallel.tp * parallel.cp
    for first in range(0, parallel.world, near):
        for tensor in range(parallel.tp):
            ranks = list(range(first + tensor, first + near, parallel.tp))
            group = dist.new_group(ranks)
            if here in ranks:
                _group = group


def index() -> int:
    """Which part is this rank's."""
    return 0 if _group is None else dist.get_rank(_group)


def gathered(x: Tensor) -> Tensor:
    """The parts [s / cp, ...] of all ranks [s, ...]; gradients of a part are added up over the ranks."""
    return x if _group is None else gather_from_sequence_parallel_region(x, group=_group)


def added(x: Tensor) -> Tensor:
    """Sum over the ranks, in place, without gradient."""
    if _group is not None:
        dist.all_reduce(x, group=_group)
    return x
