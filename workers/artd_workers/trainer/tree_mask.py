"""Who sees whom in a packed row, said in one number a token.

Purpose: the packer lays a row's segments out in preorder, so what may look at a token is one run of the row: the token
itself and all up to the end of the last segment below its own. `until` holds that end; everything else here is derived from
it: the dense mask, FlexAttention's block mask, and whether a row is a plain chain. Owner of: no state.
Invariants: query q sees key k iff k <= q < until[k]; nothing here but `hidden` makes a tensor of [s, s].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of one block of FlexAttention's mask."""


COARSE = 1024
"""Rows longer than this are padded to a multiple of it, so that they have few lengths: each costs a compilation."""


def chain(size: int) -> Tensor:
    """`until` int64 [size] of a row that is one sequence."""
    return torch.full((size,), size)


def is_chain(until: Tensor) -> bool:
    """Whether the row is one sequence, in which every token sees all before it. On a device this waits for it."""
    return bool((until == len(until)).all())


def hidden(until: Tensor) -> Tensor:
    """Bool [s, s], True where query q (first) must not see key k."""
    at = torch.arange(len(until), device=until.device)
    return (at[None, :] > at[:, None]) | (at[:, None] >= until[None, :])


def block_mask(until: Tensor, begin: int = 0, count: int | None = None) -> BlockMask:
    """FlexAttention's mask of a row whose length is a multiple of BLOCK, made from block bounds alone; for its queries from
    `begin` on, `count` of them (None = all), both multiples too.

    A block below the diagonal is full if all its keys reach beyond its last query, and empty if none reaches its first.
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
    return BlockMask.from_kv_blocks(*_listed(partial[own]), *_listed(full[own]), BLOCK_SIZE=BLOCK, mask_mod=visible)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [q blocks, k blocks] -> how many each q block has, and their numbers first in each list; int32 [1, 1, ...]."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def fill(until: Tensor, extra: int) -> Tensor:
    """`until` of the row with `extra` tokens behind it, each of which sees itself only."""
    size = len(until)
    return torch.cat((until, torch.arange(size + 1, size + extra + 1, device=until.device, dtype=until.dtype)))


class RowMask:
    """What the layers share of the row at hand, made once for all of them: its block mask, and its rotary turns.

    Not a function of a row's number but of its very `until`: a recomputed forward may come after another row's.
    """

    def __init__(self) -> None:
        self._key: tuple[int, torch.Size, int] | None = None
        self._until: Tensor | None = None
        self._mask: BlockMask | None = None
        self._turns: tuple[Tensor, Tensor] | None = None

    def of(self, until: Tensor, begin: int = 0, count: int | None = None) -> BlockMask:
        """The block mask of a row [s] and its padding; of some of its queries as `block_mask` has it, always the same ones."""
        self._hold(until)
        if self._mask is None:
            self._mask = block_mask(fill(until, padding(len(until)) if count is None else 0), begin, count)
        return self._mask

    def turns(self, until: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine fp32 [s, d / 2] of the angles [s, 1, 1, d], whose halves are the same, of this rank's tokens."""
        self._hold(until)
        if self._turns is None:
            half = angles.flatten(1)[:, : angles.shape[-1] // 2].float()
            self._turns = half.cos(), half.sin()
        return self._turns

    def _hold(self, until: Tensor) -> None:
        key = (until.data_ptr(), until.shape, until._version)
        if key != self._key:
            # Holding the tensor keeps its memory from becoming another row's.
            self._key, self._until, self._mask, self._turns = key, until, None, None


def padding(size: int) -> int:
    """Tokens to put behind a row of `size` before FlexAttention."""
    return -size % (BLOCK if size <= COARSE else COARSE)
