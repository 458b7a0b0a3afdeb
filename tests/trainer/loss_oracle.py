"""Every loss in float64 numpy, token by token from the papers' formulas, with gradients by hand.

It uses nothing of artd. A batch is a list of sequences, whatever rows hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import exp

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Slopes = Callable[[F64], F64]
"""Weights of a sequence's token losses -> gradient of their weighted sum in the sequence's logprobs."""


@dataclass(frozen=True)
class Seq:
    """One sequence [n]. new, old, base: logprobs of trainer, engine and base model; weights: of the samples; entropy: in nats."""

    trajectory: int
    new: F64
    old: F64
    advantages: F64
    weights: F64
    base: F64 = field(default_factory=lambda: np.zeros(0))
    entropy: F64 = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class Setting:
    """How a batch is trained. numbers: the loss's own; masks: (lowest, highest) by kind; kl: (coef, estimator, into)."""

    kind: str
    normalise: str = "token"
    divisor: float = 1.0
    numbers: dict[str, float] = field(default_factory=dict)
    proximal: str = "engine"
    tis: float | None = None
    masks: dict[str, tuple[float, float]] = field(default_factory=dict)
    kl: tuple[float, str, str] | None = None
    entropy_bonus: float = 0.0


def batch_loss(sequences: list[Seq], setting: Setting) -> tuple[float, list[F64]]:
    """The batch's loss, and its gradient in each sequence's logprobs."""
    lengths: dict[int, int] = {}
    for one in sequences:
        lengths[one.trajectory] = lengths.get(one.trajectory, 0) + len(one.new)
    total, gradients = 0.0, []
    for one in sequences:
        match setting.normalise:
            case "token":
                share = 1 / sum(lengths.values())
            case "sequence":
                share = 1 / len(lengths) / lengths[one.trajectory]
            case _:
                share = 1 / len(lengths) / setting.divisor
        counts = one.weights * share
        values, slopes = corrected(one, setting)
        total += float(np.sum(values * counts))
        gradients.append(slopes(counts))
        if setting.kl and setting.kl[2] == "loss":
            coef, estimator, _ = setting.kl
            found = [_kl(estimator, float(x)) for x in one.new - one.base]
            total += coef * sum(count * value for count, (value, _) in zip(counts, found, strict=True))
            gradients[-1] = gradients[-1] + coef * counts * np.array([slope for _, slope in found])
        if setting.entropy_bonus:
            total -= setting.entropy_bonus * float(np.sum(counts * one.entropy))
    return total, gradients


def corrected(one: Seq, setting: Setting) -> tuple[F64, Slopes]:
    """The token losses with penalised advantages, weighed."""
    advantages = one.advantages
    if setting.kl and setting.kl[2] == "advantage":
        coef, estimator, _ = setting.kl
        advantages = advantages - coef * np.array([_kl(estimator, float(x))[0] for x in one.new - one.base])
    old = one.new if setting.proximal == "trainer" else one.old
    values, slopes = token_losses(replace(one, old=old, advantages=advantages), setting)
    weight = weights_of(one, setting)
    return values * weight, lambda counts: slopes(counts * weight)


def weights_of(one: Seq, setting: Setting) -> F64:
    """What the corrections weigh each token with."""
    k = [exp(new - old) for new, old in zip(one.new, one.old, strict=True)]
    product = 1.0
    for each in k:
        product *= each
    judged = {"icepop": k, "product": [product] * len(k), "geometric": [product ** (1 / len(k))] * len(k)}
    out = np.ones(len(k))
    for t, each in enumerate(k):
        if setting.tis is not None:
            out[t] = each if each < setting.tis else setting.tis
        elif setting.proximal == "trainer":
            out[t] = each
        for kind, (low, high) in setting.masks.items():
            if judged[kind][t] < low or judged[kind][t] > high:
                out[t] = 0.0
    return out


def _kl(estimator: str, x: float) -> tuple[float, float]:
    """(estimate, d estimate / d logprob) at x = log policy - log base."""
    if estimator == "k1":
        return x, 1.0
    return (x * x / 2, x) if estimator == "k2" else (exp(-x) + x - 1, 1 - exp(-x))


def token_losses(one: Seq, setting: Setting) -> tuple[F64, Slopes]:
    """Each token's loss, and how a weighted sum of them changes with the logprobs."""
    if setting.kind == "gspo":
        return _gspo(one, setting.numbers)
    pairs = [
        _token(setting.kind, new, exp(new - old), advantage, setting.numbers)
        for new, old, advantage in zip(one.new, one.old, one.advantages, strict=True)
    ]
    values, slopes = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    return values, lambda weights: weights * slopes


def _token(kind: str, logprob: float, r: float, a: float, p: dict[str, float]) -> tuple[float, float]:
    """(loss, d loss / d logprob) of one token. d r / d logprob = r."""
    if kind == "sft":
        return -logprob, -1.0
    if kind == "reinforce":
        return -a * logprob, -a
    if kind == "importance_sampling":
        return -r * a, -r * a
    if kind == "cispo":
        held = r if r < p["clip_high"] else p["clip_high"]
        return -held * a * logprob, -held * a
    low, high = 1 - p["clip_low"], 1 + p["clip_high"]
    if a > 0:
        return (-r * a, -r * a) if r <= high else (-high * a, 0.0)
    if r < low:
        return -low * a, 0.0
    if kind == "ppo" and r > p["dual_clip"]:
        return -p["dual_clip"] * a, 0.0
    return -r * a, -r * a


def _gspo(one: Seq, p: dict[str, float]) -> tuple[F64, Slopes]:
    """One ratio s for the sequence; d s / d logprob = s / n for each of its tokens."""
    n = len(one.new)
    s = exp(sum(new - old for new, old in zip(one.new, one.old, strict=True)) / n)
    low, high = 1 - p["clip_low"], 1 + p["clip_high"]
    values, slopes = np.zeros(n), np.zeros(n)
    for t, a in enumerate(one.advantages):
        held = min(max(s, low), high)
        values[t] = -min(s * a, held * a)
        slopes[t] = 0.0 if (a > 0 and s > high) or (a < 0 and s < low) else -a * s / n
    return values, lambda weights: np.full(n, float(np.sum(weights * slopes)))
