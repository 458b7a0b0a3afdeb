"""How far trainer and engine disagree about the same tokens: the formulas of docs/metrics.md.

Owner of: no state; pure (numpy). Invariants: everything is summed in float64; natural logarithms; a number that is not
finite is an error, never a row of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Engine:
    """What the engine said of M sampled tokens: logprobs [M] of the tokens, top_ids [M, K] and top_logprobs [M, K] of its
    K likeliest ids, best first."""

    logprobs: Array
    top_ids: Array
    top_logprobs: Array


@dataclass(frozen=True)
class Trainer:
    """What the trainer says of the same tokens. at_top [M, K]: its logprobs of the *engine's* top ids; top_ids [M, K]: its
    own likeliest ones, best first."""

    logprobs: Array
    at_top: Array
    top_ids: Array


@dataclass(frozen=True)
class Mismatch:
    """One column of the table. top: K. mae, max, top_kl: nats; mean_abs_pct: %; top1, top_overlap: shares."""

    tokens: int
    top: int
    mae: float
    max: float
    mean_abs_pct: float
    top1: float
    top_overlap: float
    top_kl: float


def compare(engine: Engine, trainer: Trainer) -> Mismatch:
    """Raises ValueError when a logprob is not finite, or when there is no token."""
    told = [np.asarray(values, np.float64) for values in (engine.logprobs, engine.top_logprobs)]
    found = [np.asarray(values, np.float64) for values in (trainer.logprobs, trainer.at_top)]
    tokens, top = engine.top_ids.shape
    if not tokens or not all(np.isfinite(values).all() for values in (*told, *found)):
        raise ValueError("there is no token to compare" if not tokens else "a logprob is not finite")
    difference = np.abs(found[0] - told[0])
    scale = np.abs(told[0]).mean()
    shared = (engine.top_ids[:, :, None] == trainer.top_ids[:, None, :]).any(-1)
    return Mismatch(
        tokens=tokens,
        top=top,
        mae=float(difference.mean()),
        max=float(difference.max()),
        mean_abs_pct=float(100.0 * difference.mean() / scale) if scale > 0 else 0.0,
        top1=float((engine.top_ids[:, 0] == trainer.top_ids[:, 0]).mean()),
        top_overlap=float(shared.mean()),
        top_kl=float(_divergence(found[1], told[1]).mean()),
    )


def _divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(p || q) per token [M] of two lists of logprobs [M, K] over the same ids, each made to sum to 1 over them."""
    p, q = (values - np.logaddexp.reduce(values, axis=-1, keepdims=True) for values in (p, q))
    return (np.exp(p) * (p - q)).sum(-1)
