"""The formulas of docs/metrics.md, written down a second time in plain Python."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from artd.cli.mismatch.metrics import Engine, Mismatch, Trainer, compare

TOKENS, VOCAB, TOP = 40, 50, 7


def softmax(values: list[float]) -> list[float]:
    total = math.fsum(math.exp(value) for value in values)
    return [value - math.log(total) for value in values]


class Case:
    """Two distributions per token over VOCAB ids that differ by `noise`, and a sampled id."""

    def __init__(self, seed: int = 0, noise: float = 0.3) -> None:
        rng = random.Random(seed)
        logits = [[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(TOKENS)]
        self.engine = [softmax(row) for row in logits]
        self.trainer = [softmax([value + rng.gauss(0, noise) for value in row]) for row in logits]
        self.sampled = [rng.randrange(VOCAB) for _ in range(TOKENS)]

    @staticmethod
    def top(row: list[float]) -> list[int]:
        return sorted(range(VOCAB), key=lambda number: -row[number])[:TOP]

    def measured(self) -> Mismatch:
        tops = [self.top(row) for row in self.engine]
        engine = Engine(
            np.array([row[i] for row, i in zip(self.engine, self.sampled, strict=True)]),
            np.array(tops),
            np.array([[row[i] for i in top] for row, top in zip(self.engine, tops, strict=True)]),
        )
        trainer = Trainer(
            np.array([row[i] for row, i in zip(self.trainer, self.sampled, strict=True)]),
            np.array([[row[i] for i in top] for row, top in zip(self.trainer, tops, strict=True)]),
            np.array([self.top(row) for row in self.trainer]),
        )
        return compare(engine, trainer)

    def wanted(self) -> Mismatch:
        differences, scale, top1, shared, kl = [], [], 0, 0, []
        for theirs, ours, sampled in zip(self.engine, self.trainer, self.sampled, strict=True):
            differences.append(abs(ours[sampled] - theirs[sampled]))
            scale.append(abs(theirs[sampled]))
            ids = self.top(theirs)
            top1 += ids[0] == self.top(ours)[0]
            shared += len(set(ids) & set(self.top(ours)))
            q, p = softmax([theirs[i] for i in ids]), softmax([ours[i] for i in ids])
            kl.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
        mae = math.fsum(differences) / TOKENS
        return Mismatch(
            tokens=TOKENS, top=TOP, mae=mae, max=max(differences), mean_abs_pct=100 * mae / (math.fsum(scale) / TOKENS),
            top1=top1 / TOKENS, top_overlap=shared / TOKENS / TOP, top_kl=math.fsum(kl) / TOKENS,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_they_are_the_formulas(seed: int) -> None:
    case = Case(seed)
    found, wanted = case.measured(), case.wanted()
    for name in Mismatch.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-12, abs=1e-15), name
    assert 0 < found.top1 < 1 and 0 < found.top_overlap < 1 and found.top_kl > 0


def test_the_kl_is_of_the_trainer_from_the_engine() -> None:
    """The other way round is another number."""
    case = Case(1, noise=2.0)
    case.engine, case.trainer = case.trainer, case.engine
    assert case.measured().top_kl != pytest.approx(Case(1, noise=2.0).measured().top_kl, rel=0.01)


def test_two_that_agree_differ_by_nothing() -> None:
    found = Case(noise=0.0).measured()
    assert (found.mae, found.max, found.mean_abs_pct, found.top1, found.top_overlap) == (0, 0, 0, 1, 1)
    assert found.top_kl == pytest.approx(0, abs=1e-15)


def test_mass_outside_the_top_does_not_count_in_the_kl() -> None:
    case = Case()
    case.trainer = [
        softmax([value - 3.0 * (i in case.top(theirs)) for i, value in enumerate(theirs)]) for theirs in case.engine
    ]
    assert case.measured().top_kl == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_not_finite_is_an_error(value: float) -> None:
    case = Case()
    case.trainer[3][case.sampled[3]] = value
    with pytest.raises(ValueError, match="not finite"):
        case.measured()


def test_no_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token"):
        compare(
            Engine(np.zeros(0), np.zeros((0, 3)), np.zeros((0, 3))),
            Trainer(np.zeros(0), np.zeros((0, 3)), np.zeros((0, 3))),
        )
