"""What is added to every token's loss, or taken from its advantage: the distance to the base model, and entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import UNSET
from torch import Tensor

from artd_schema.run.spec import LossSpec

from .loss_api import LossInputs, Mean
from .losses import exp_bounded


def kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) from each sampled token [n] (J. Schulman, "Approximating KL divergence", 2020), with x = log policy -
    log reference: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x."""
    x = logprobs - reference
    if estimator == "k1":
        return x
    return x.square() / 2 if estimator == "k2" else exp_bounded(-x) - 1 + x


def penalise(inputs: LossInputs, reference: Tensor | None, spec: LossSpec) -> LossInputs:
    """Return the inputs with the KL of each token taken from its advantage, where the spec asks for that: no gradient goes through it."""
    if reference is None or spec.kl is UNSET or spec.kl.into != "advantage":
        return inputs
    distance = kl(inputs.logprobs.detach(), reference, spec.kl.estimator)
    return replace(inputs, advantages=inputs.advantages - spec.kl.coef * distance)


def add_penalties(
    tokens: Tensor, inputs: LossInputs, reference: Tensor | None, entropy: Tensor | None, spec: LossSpec
) -> tuple[Tensor, Mapping[str, Mean]]:
    """Return the losses [n] with coef * KL added and entropy_bonus * entropy taken off, and what the KL is."""
    metrics: dict[str, Mean] = {}
    if reference is not None and spec.kl is not UNSET:
        distance = kl(inputs.logprobs, reference, spec.kl.estimator)
        metrics = {"kl_reference": Mean.of(distance)}
        if spec.kl.into == "loss":
            tokens = tokens + spec.kl.coef * distance
    if entropy is not None and spec.entropy_bonus is not UNSET:
        tokens = tokens - spec.entropy_bonus * entropy
    return tokens, metrics
