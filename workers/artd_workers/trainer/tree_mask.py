"""The attention mask of a packed row, described by one number per token.

The packer orders a row's segments in preorder, so the tokens that may see a token are one run of the row: itself and all up to
the end of the last segment below its own. `until` holds that end. The dense mask, FlexAttention's block mask, and whether a row
is a plain chain all follow from it. Query q sees key k if k <= q < until[k]. Only `hidden` makes a tensor of [s, s].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of one block of FlexAttention's mask."""


COARSE = 1024
"""Longer rows are padded to a multiple of this, so that they have few lengths, each of which costs a compilation."""


def chain(size: int) -> Tensor:
    """Return `until` int64 [size] of a row that is one sequence."""
    return torch.full((size,), size)


def is_chain(until: Tensor) -> bool:
    """Return whether the row is one sequence, in which every token sees all before it. For a tensor on a GPU it waits."""
    return bool((until == len(until)).all())


def hidden(until: Tensor) -> Tensor:
    """Return bool [s, s], True where query q (first) must not see key k."""
    at = torch.arange(len(until), device=until.device)
    return (at[None, :] > at[:, None]) | (at[:, None] >= until[None, :])


def block_mask(until: Tensor, begin: int = 0, count: int | None = None) -> BlockMask:
    """Return FlexAttention's mask of a row whose length is a multiple of BLOCK, made from block bounds alone.

    `begin`, `count`: the queries to mask (None = all from `begin` on), both multiples too. A block below the diagonal is full
    if all its keys reach beyond its last query, and empty if none reaches its first. Raises ValueError for another length.
    """
    size, device = len(until), until.device
    if size % BLOCK:
        raise ValueError(f"a row of {size} tokens is not a multiple of {BLOCK}: pad it first")
    until = until.to(torch.int32)
    ends = until.view(-1, BLOCK)
    first = torch.arange(0, size, BLOCK, device=device, dtype=torch.int32)[:, None]
    below = first > first.t()
    full = below & (ends.amin(1)[None, :] >= first + BLOCK)
    partial = (below & (ends.amax(1)[None, :] > first) & ~full) | (first == first.t())

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + begin if begin else q
        return (k <= q) & (q < until[k])

    own = slice(begin // BLOCK, None if count is None else (begin + count) // BLOCK)
    return BlockMask.from_kv_blocks(
        *_list_blocks(partial[own]), *_list_blocks(full[own]), BLOCK_SIZE=BLOCK, mask_mod=visible
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return, of bool [q blocks, k blocks], how many blocks each q block has and their numbers first in each list; int32 [1, 1,
    ...]."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def fill(until: Tensor, extra: int) -> Tensor:
    """Return `until` of the row with `extra` tokens after it, each of which sees only itself."""
    size = len(until)
    return torch.cat((until, torch.arange(size + 1, size + extra + 1, device=until.device, dtype=until.dtype)))


class RowMask:
    """What the layers share of the present row, made once for all of them: its block mask, and cosine and sine of its
    positions.

    It belongs to one `until` tensor, not to a row's number, because a recomputed forward may follow another row's.
    """

    def __init__(self) -> None:
        self._key: tuple[int, torch.Size, int] | None = None
        self._until: Tensor | None = None
        self._mask: BlockMask | None = None
        self._rotations: tuple[Tensor, Tensor] | None = None

    def of(self, until: Tensor, begin: int = 0, count: int | None = None) -> BlockMask:
        """Return the block mask of a row [s] with its padding, or of some of its queries as in `block_mask`, always the same
        ones."""
        self._hold(until)
        if self._mask is None:
            self._mask = block_mask(fill(until, padding(len(until)) if count is None else 0), begin, count)
        return self._mask

    def rotations(self, until: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, fp32 [s, d / 2], of the angles [s, 1, 1, d] of this rank's tokens; the angles' halves are
        equal."""
        self._hold(until)
        if self._rotations is None:
            half = angles.flatten(1)[:, : angles.shape[-1] // 2].float()
            self._rotations = half.cos(), half.sin()
        return self._rotations

    def _hold(self, until: Tensor) -> None:
        key = (until.data_ptr(), until.shape, until._version)
        if key != self._key:
            # Keeping the tensor prevents another row from getting its memory and so its key.
            self._key, self._until, self._mask, self._rotations = key, until, None, None


def padding(size: int) -> int:
    """Return how many tokens FlexAttention needs after a row of `size`."""
    return -size % (BLOCK if size <= COARSE else COARSE)
