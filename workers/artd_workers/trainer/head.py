"""From logits to what a step needs of them: the logprob of each chosen token, and the entropy.

Purpose: `scores` for any device. On a GPU the logits [n, vocab] are the largest tensors of a step (4 GB in fp32 for a row of
8,192 tokens), so there they are only read and written in their own dtype, by kernels that the compiler makes of `_forward`
and `_backward`. Owner of: no state. Invariants: arithmetic is fp32 either way; on the CPU nothing is compiled.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def scores(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` [n] (natural log) and, without gradient, entropies [n] in nats, at `temperatures` [n] (> 0)."""
    if logits.is_cuda:
        logprobs, entropy = Scored.apply(logits, targets, temperatures)
        return logprobs, entropy
    everything = (logits.float() / temperatures[:, None]).log_softmax(-1)
    with torch.no_grad():
        entropy = -(everything.exp() * everything).sum(-1)
    return everything.gather(-1, targets[:, None])[:, 0], entropy


class Scored(torch.autograd.Function):
    """The same, keeping nothing of the logits' size but the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy, total = _compiled()[0](logits, targets, temperatures)
        ctx.save_for_backward(logits, targets, temperatures, total)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return _compiled()[1](*ctx.saved_tensors, gradient), None, None


@lru_cache(1)
def _compiled() -> tuple[Any, Any]:
    return torch.compile(_forward), torch.compile(_backward)


def _forward(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits.float() / temperatures[:, None]
    total = scaled.logsumexp(-1)
    entropy = total - ((scaled - total[:, None]).exp() * scaled).sum(-1)
    return scaled.gather(-1, targets[:, None])[:, 0] - total, entropy, total


def _backward(logits: Tensor, targets: Tensor, temperatures: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    chosen = torch.arange(logits.shape[-1], device=logits.device)[None, :] == targets[:, None]
    share = (logits.float() / temperatures[:, None] - total[:, None]).exp()
    return ((chosen.float() - share) * (gradient / temperatures)[:, None]).to(logits.dtype)
