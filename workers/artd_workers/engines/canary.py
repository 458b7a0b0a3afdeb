"""The canary: does the engine score fixed prompts as the trainer did when it made the checkpoint?

Purpose: the proof of a push where weights cannot be compared bit by bit (the CPU engine repacks them).
Owner of: no state. Invariants: NaN, a missing score or an empty canary fail; nothing passes by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from artd_schema.manifest import Canary

from .base import EngineError


@dataclass(frozen=True)
class Agreement:
    """|engine - trainer| over all scored tokens, in nats."""

    max_abs: float
    mean_abs: float
    tokens: int


def measure(canary: Canary, scores: Sequence[Sequence[float]]) -> Agreement:
    """Compare the engine's scores with the trainer's. Raises EngineError when they do not line up or are not finite."""
    expected = canary.logprobs
    if not expected or not any(expected):
        raise EngineError("the checkpoint's canary is empty, so nothing can be verified; train and commit a new step")
    got, want = [len(row) for row in scores], [len(row) for row in expected]
    if got != want:
        raise EngineError(f"the engine scored {got} tokens per canary prompt, the checkpoint has {want}")
    differences = [
        abs(a - b) for row, other in zip(scores, expected, strict=True) for a, b in zip(row, other, strict=True)
    ]
    if not all(math.isfinite(value) for value in differences):
        raise EngineError("a canary score is not finite: the weights in the engine are not those of the checkpoint")
    return Agreement(max(differences), math.fsum(differences) / len(differences), len(differences))


def verify(canary: Canary, scores: Sequence[Sequence[float]]) -> Agreement:
    """`measure`, and raise EngineError when a bound of the canary is exceeded."""
    found = measure(canary, scores)
    if found.max_abs > canary.max_abs or found.mean_abs > canary.mean_abs:
        raise EngineError(
            f"canary failed: max |difference| {found.max_abs:.3g} (bound {canary.max_abs:.3g}), mean {found.mean_abs:.3g} "
            f"(bound {canary.mean_abs:.3g}) over {found.tokens} tokens; the engine does not serve this checkpoint"
        )
    return found
