"""Checks the canary: the engine must score fixed prompts as the trainer did when it made the checkpoint.

It proves a push where weights cannot be compared bit by bit (the CPU engine repacks them), and that the compared weights are
those that compute. For an adapter, the change that it makes is compared too. NaN, a missing score or an empty canary fail;
nothing passes by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from artd_schema.data.manifest import Canary

from .adapter import EngineError

SIGNIFICANT = 3.0
"""How many times the rounding the trainer's own change must be (root mean squares) before the engine's is held to it."""
SLOPE, CORRELATION = (0.5, 1.5), 0.5
"""Of the engine's change over the trainer's. With noise as large as the rounding in each score they are 1 ± 0.03 and 0.95 at
`SIGNIFICANT` (of 124 tokens), with 3.5 times that 1 ± 0.1 and 0.65; an adapter that is not there has 0 and 0."""
Scores = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Agreement:
    """The |difference| of engine and trainer over all scored tokens, in nats."""

    max_abs: float
    mean_abs: float
    tokens: int


@dataclass(frozen=True)
class Change:
    """How an adapter changes the scores, by the engine and by the trainer.

    `times`: the trainer's change in units of the rounding. `slope`, `correlation`: of the engine's change over the trainer's;
    both are 1 where nothing changes.
    """

    times: float
    slope: float
    correlation: float

    @property
    def significant(self) -> bool:
        return self.times > SIGNIFICANT


def measure(canary: Canary, scores: Scores) -> Agreement:
    """Compare the engine's scores with the trainer's. Raises EngineError when they do not match in number or are not finite."""
    return _agreement(canary.logprobs, scores)


def verify(canary: Canary, scores: Scores) -> Agreement:
    """Compare as `measure` does. Raises EngineError also when a bound of the canary is exceeded."""
    return _within(canary, _agreement(canary.logprobs, scores), "this checkpoint")


def verify_adapter(canary: Canary, base: Scores, scores: Scores) -> tuple[Agreement, Change]:
    """Verify an adapter, the base model below it, and the change between the two, in which rounding cancels.

    `base`: the engine's scores without the adapter. Raises EngineError.
    """
    _within(canary, _agreement(canary.base, base), "the base model of this checkpoint")
    agreement = verify(canary, scores)
    change = _change(canary, base, scores)
    if change.significant and not (SLOPE[0] <= change.slope <= SLOPE[1] and change.correlation >= CORRELATION):
        raise EngineError(
            f"canary failed: the adapter changes the engine's scores by {change.slope:.3g} times (bounds {SLOPE[0]:g} to "
            f"{SLOPE[1]:g}) what it changes the trainer's, correlation {change.correlation:.3g} (at least {CORRELATION:g}); the "
            f"trainer's change is {change.times:.3g} times what rounding explains; the engine does not serve this adapter"
        )
    return agreement, change


def _change(canary: Canary, base: Scores, scores: Scores) -> Change:
    wanted = _differences(canary.logprobs, canary.base)
    found = _differences(scores, base)
    own, theirs = math.hypot(*wanted), math.hypot(*found)
    if not own:
        return Change(0.0, 1.0, 1.0)
    along = math.fsum(a * b for a, b in zip(found, wanted, strict=True))
    size = own / math.sqrt(len(wanted))
    times = size / canary.rounding if canary.rounding > 0 else math.inf
    return Change(times, along / own**2, along / (own * theirs) if theirs else 0.0)


def _within(canary: Canary, found: Agreement, what: str) -> Agreement:
    if found.max_abs > canary.max_abs or found.mean_abs > canary.mean_abs:
        raise EngineError(
            f"canary failed: max |difference| {found.max_abs:.3g} (bound {canary.max_abs:.3g}), mean {found.mean_abs:.3g} "
            f"(bound {canary.mean_abs:.3g}) over {found.tokens} tokens; the engine does not serve {what}"
        )
    return found


def _agreement(expected: Scores, scores: Scores) -> Agreement:
    if not expected or not any(expected):
        raise EngineError("the checkpoint's canary is empty, so nothing can be verified; train and commit a new step")
    got, want = [len(row) for row in scores], [len(row) for row in expected]
    if got != want:
        raise EngineError(f"the engine scored {got} tokens per canary prompt, the checkpoint has {want}")
    differences = [abs(one) for one in _differences(scores, expected)]
    if not all(math.isfinite(value) for value in differences):
        raise EngineError("a canary score is not finite: the weights in the engine are not those of the checkpoint")
    return Agreement(max(differences), math.fsum(differences) / len(differences), len(differences))


def _differences(ours: Scores, theirs: Scores) -> list[float]:
    return [a - b for row, other in zip(ours, theirs, strict=True) for a, b in zip(row, other, strict=True)]
