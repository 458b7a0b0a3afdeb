"""Measures how far trainer and engine disagree about the same tokens, by the formulas of docs/metrics.md.

Sums are in float64, logarithms are natural. A number that is not finite is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Engine:
    """The engine's view of M sampled tokens: their `logprobs` [M], and `top_ids` and `top_logprobs` [M, K] of its K likeliest
    ids, best first."""

    logprobs: Array
    top_ids: Array
    top_logprobs: Array


@dataclass(frozen=True)
class Trainer:
    """The trainer's view of the same tokens. `at_top` [M, K]: its logprobs of the *engine's* top ids; `top_ids` [M, K]: its own
    likeliest ids, best first."""

    logprobs: Array
    at_top: Array
    top_ids: Array


@dataclass(frozen=True)
class Mismatch:
    """One column of the table. `top`: K; `mae`, `max`, `top_kl`: in nats; `mean_abs_pct`: in percent; `top1`, `top_overlap`:
    shares from 0 to 1."""

    tokens: int
    top: int
    mae: float
    max: float
    mean_abs_pct: float
    top1: float
    top_overlap: float
    top_kl: float


def compare(engine: Engine, trainer: Trainer) -> Mismatch:
    """Compare the two views. Raises ValueError when a logprob is not finite, or there is no token."""
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
    """Return KL(p || q) of each token [M]. `p`, `q` [M, K]: logprobs of the same ids, normalised over them."""
    p, q = (values - np.logaddexp.reduce(values, axis=-1, keepdims=True) for values in (p, q))
    return (np.exp(p) * (p - q)).sum(-1)
