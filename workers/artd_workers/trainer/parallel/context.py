"""Context parallelism: each rank holds one contiguous part of a row's tokens, and its queries attend to the keys of
all parts.

The module owns the process group of the ranks that share this rank's rows. The parts of a row have equal lengths and
lie in the order of ranks. A query sees exactly what the row's mask allows, whichever rank holds that token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from artd_workers.trainer import tree_mask

from .layout import Parallel

_PART = 2 * tree_mask.BLOCK
"""On a GPU the number of tokens in a rank's part is a multiple of this. Parts then have few lengths; each new length
costs a compilation.
"""

_group: dist.ProcessGroup | None = None


def make_groups(parallel: Parallel) -> None:
    """Create the process groups of a layout. Collective: every rank calls it."""
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
    """Return which part of a row this rank holds, from 0."""
    return 0 if _group is None else dist.get_rank(_group)


def all_gather(x: Tensor) -> Tensor:
    """Concatenate the parts [s / cp, ...] of all ranks to [s, ...]. The backward sums a part's gradients over the
    ranks. Collective: every rank that shares the row calls it.
    """
    return x if _group is None else gather_from_sequence_parallel_region(x, group=_group)


def all_reduce(x: Tensor) -> Tensor:
    """Sum `x` over the ranks, in place and without a gradient. Collective: every rank that shares the row calls it."""
    if _group is not None:
        dist.all_reduce(x, group=_group)
    return x


class _Summed(torch.autograd.Function):
    """A sum over ranks with a gradient. The losses of all ranks depend on the sum, so the gradient of each rank's part
    is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad.clone())


def add_with_gradient(x: Tensor) -> Tensor:
    """All-reduce `x`, with gradient. Collective: every rank calls it, and the result reaches the loss of every rank."""
    return x if _group is None else _Summed.apply(x)


def tokens_per_rank(parallel: Parallel, size: int, blocks: bool) -> int:
    """Return how many tokens, padding included, each rank holds of a row of `size` tokens.

    `blocks` asks for parts that consist of whole FlexAttention blocks.
    """
    part = -(-size // parallel.cp)
    if blocks and parallel.cp > 1:
        part += -part % _PART
    return part + -part % parallel.tp


def pad_row(tokens: Tensor, positions: Tensor, hidden_from: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad a row [s] to a multiple of `multiple` tokens, as sequence parallelism needs. Padding sees only itself, and
    no token sees it.
    """
    size, extra = len(tokens), -len(tokens) % multiple
    if extra == 0:
        return tokens, positions, hidden_from
    mask = ~torch.eye(size + extra, dtype=torch.bool)
    mask[:size, :size] = hidden_from
    return F.pad(tokens, (0, extra)), F.pad(positions, (0, extra)), mask


def routes_of_rank(routes: Tensor, rank: int, size: int) -> Tensor:
    """Return the routes [layers, size, topk] of one rank's part, cut from those of the whole row [layers, T, topk].
    Tokens beyond T are padding.
    """
    return pad_routes(routes[:, rank * size : (rank + 1) * size], size)


def pad_routes(routes: Tensor, size: int) -> Tensor:
    """Pad routes [layers, T, topk] to `size` tokens. Padding has the expert ids 0 .. topk-1."""
    layers, tokens, topk = routes.shape
    padding = torch.arange(topk, dtype=routes.dtype, device=routes.device).expand(layers, size - tokens, topk)
    return torch.cat((routes, padding), 1)
