"""Makes queries, keys and values for FlexAttention from a layer's joint product, in one pass.

`split` cuts, normalises, rotates, repeats (a key and its value for each query head of their group) and pads. Repeated keys cost
little memory, and let FlexAttention's backward divide the keys of a prompt, which a whole tree sees, among as many programs as
there are query heads. Where the norms are frozen one kernel does it; plain torch gives trained norms their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Norms = tuple[Tensor, Tensor]
"""Weights [dim] of the queries' and the keys' RMS norm."""


def split(
    mixed: Tensor, norms: Norms | None, rotations: tuple[Tensor, Tensor], padded: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [padded, groups * each, dim].

    `mixed` [s, groups, each + 2, dim]: a group's queries, its key, its value. `rotations`: cosine and sine, fp32 [s, dim / 2].
    `padded`: the length to which zeros are added.
    """
    if mixed.is_cuda and (norms is None or not norms[0].requires_grad):
        return _Split.apply(mixed, norms, rotations, padded, eps)
    return split_plainly(mixed, norms, rotations, padded, eps)


def split_plainly(
    mixed: Tensor, norms: Norms | None, rotations: tuple[Tensor, Tensor], padded: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `split` in plain torch."""
    each, dim = mixed.shape[2] - 2, mixed.shape[3]
    cos, sin = (rotation[:, None, None] for rotation in rotations)
    found = []
    for part, norm in ((mixed[:, :, :each], 0), (mixed[:, :, each : each + 1], 1)):
        x = part.float()
        if norms is not None:
            x = F.rms_norm(x, (dim,), norms[norm].float(), eps)
        low, high = x.chunk(2, -1)
        found.append(torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(mixed.dtype))
    parts = found[0], found[1].expand(-1, -1, each, -1), mixed[:, :, each + 1 :].expand(-1, -1, each, -1)
    q, k, v = (F.pad(x.flatten(1, 2), (0, 0, 0, 0, 0, padded - len(x))) for x in parts)
    return q, k, v


class _Split(torch.autograd.Function):
    """Computes `split` with one kernel forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, norms: Norms | None, rotations: tuple[Tensor, Tensor], padded: int, eps: float
    ) -> Any:
        from artd_workers.trainer.model.kernels import qkv

        ctx.save_for_backward(mixed, *rotations, *(norms or ()))
        ctx.eps = eps
        return qkv.heads(mixed, norms, *rotations, padded, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from artd_workers.trainer.model.kernels import qkv

        mixed, cos, sin, *norms = ctx.saved_tensors
        dq, dk, dv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        pair = (norms[0], norms[1]) if norms else None
        return qkv.heads_backward((dq, dk, dv), mixed, pair, cos, sin, ctx.eps), None, None, None, None
