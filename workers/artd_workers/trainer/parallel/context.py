"""A row whose tokens are shared out over ranks: each has a contiguous part, and its queries look at the keys of all.

Purpose: `each`, `padded` and `chunk` cut a row and its routes; `gathered` brings keys and values together for an attention, and
their gradients back.
Owner of: the group of the ranks that share this rank's rows. Invariants: parts are equally long and in the order of ranks; a
part's queries see what the row's mask lets them see, wherever it lies.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from artd_workers.trainer import tree_mask

from .layout import Parallel

_PART = 2 * tree_mask.BLOCK
"""Tokens of which a rank's part of a row is a multiple on a GPU: so that parts have few lengths, each of which costs a
compilation."""

_group: dist.ProcessGroup | None = None


def make_groups(parallel: Parallel) -> None:
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


def part_index() -> int:
    """Which part is this rank's."""
    return 0 if _group is None else dist.get_rank(_group)


def all_gather(x: Tensor) -> Tensor:
    """The parts [s / cp, ...] of all ranks [s, ...]; gradients of a part are added up over the ranks."""
    return x if _group is None else gather_from_sequence_parallel_region(x, group=_group)


def all_reduce(x: Tensor) -> Tensor:
    """Sum over the ranks, in place, without gradient."""
    if _group is not None:
        dist.all_reduce(x, group=_group)
    return x


def tokens_per_rank(parallel: Parallel, size: int, blocks: bool) -> int:
    """Tokens that each of the ranks which share a row's tokens has of a row of `size`, padding with it. blocks: parts must be
    made of FlexAttention's blocks."""
    part = -(-size // parallel.cp)
    if blocks and parallel.cp > 1:
        part += -part % _PART
    return part + -part % parallel.tp


def pad_row(tokens: Tensor, positions: Tensor, hidden_from: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row [s] whose length is a multiple, for sequence parallelism: padding sees itself only, and nothing sees it."""
    size, extra = len(tokens), -len(tokens) % multiple
    if extra == 0:
        return tokens, positions, hidden_from
    mask = ~torch.eye(size + extra, dtype=torch.bool)
    mask[:size, :size] = hidden_from
    return F.pad(tokens, (0, extra)), F.pad(positions, (0, extra)), mask


def routes_of_rank(routes: Tensor, rank: int, size: int) -> Tensor:
    """Routes [layers, size, topk] of one of the ranks that share a row: its contiguous part of [layers, T, topk].

    What lies beyond T is padding.
    """
    return pad_routes(routes[:, rank * size : (rank + 1) * size], size)


def pad_routes(routes: Tensor, size: int) -> Tensor:
    """Routes [layers, T, topk] with padding behind them up to `size` tokens, which has the ids 0 .. topk-1."""
    layers, tokens, topk = routes.shape
    padding = torch.arange(topk, dtype=routes.dtype, device=routes.device).expand(layers, size - tokens, topk)
    return torch.cat((routes, padding), 1)
