"""Measures that every step has, whatever its loss: importance ratios, divergence, entropy, staleness, mismatch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from artd_workers.trainer.batch.rows import PackedRow

from .losses import ratio


class Measures:
    """Collects the measures of a step token by token, and reduces them once at the end, so that they do not depend on
    the packing.

    `found` is fp64 [2, trained tokens of the batch]: logprobs and entropies in the order of `rows`, zero where nothing
    was added.
    """

    def __init__(self, rows: Sequence[PackedRow], device: torch.device) -> None:
        self._rows = rows
        self.found = torch.zeros(2, sum(len(row.at) for row in rows), dtype=torch.float64, device=device)

    def add(self, first: int, logprobs: Tensor, entropy: Tensor) -> None:
        """Add the tokens of one row. `first` is the number of the batch's trained tokens before them."""
        here = slice(first, first + len(logprobs))
        self.found[0, here], self.found[1, here] = logprobs.detach(), entropy

    def metrics(self, epoch: int, sampled: bool = True) -> dict[str, float]:
        """Reduce what was added.

        `epoch` is the policy epoch of the weights that were trained; only tokens that exactly these weights sampled
        measure the mismatch. `sampled` is False where the tokens are examples, so that old logprobs mean nothing.
        """
        new, entropy = self.found.cpu()
        if not sampled:
            return {"entropy": float(entropy.mean()), "trained_tokens": float(len(new))}
        old = torch.cat([row.old_logprobs for row in self._rows]).double()
        epochs = torch.cat([row.epochs for row in self._rows])
        ratios = ratio(new, old)
        out = {
            "ratio_mean": float(ratios.mean()),
            "ratio_p95": quantile(ratios, 0.95),
            "ratio_p99": quantile(ratios, 0.99),
            # k3 of KL(old || new), J. Schulman, "Approximating KL divergence" (2020): r - 1 - log r.
            "kl_k3": float((ratios - 1 - (new - old)).mean()),
            "entropy": float(entropy.mean()),
            "trained_tokens": float(len(new)),
        }
        known = epochs >= 0
        if known.any():
            stale = (epoch - epochs[known]).double()
            out |= {"staleness_mean": float(stale.mean()), "staleness_max": float(stale.max())}
        return out | mismatch(new, old, epochs == epoch)


def mismatch(trainer: Tensor, engine: Tensor, same: Tensor) -> dict[str, float]:
    """Compare trainer and engine on the tokens that the same weights sampled (`same`, bool [n]).

    Returns the mean and maximum absolute difference in nats, and the mean as a percentage of the engine's mean
    |logprob|. Without such a token it returns only the count.
    """
    count = int(same.sum())
    out = {"mismatch_tokens": float(count)}
    if count:
        difference = (trainer[same] - engine[same]).abs()
        scale = float(engine[same].abs().mean())
        out["mismatch_mae"] = float(difference.mean())
        out["mismatch_max"] = float(difference.max())
        out["mismatch_mean_abs_pct"] = 100.0 * out["mismatch_mae"] / scale if scale > 0 else 0.0
    return out


def quantile(values: Tensor, q: float) -> float:
    """Return the smallest value that at least a share q of the values does not exceed (nearest rank)."""
    return float(values.sort().values[max(math.ceil(q * len(values)), 1) - 1])
