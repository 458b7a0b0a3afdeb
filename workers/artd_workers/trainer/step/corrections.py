"""What corrects a loss for tokens that other weights sampled, or an engine that computes otherwise than the trainer.

k[t] is the trainer's probability of token t by the engine's, without gradient. A weight multiplies the token's loss; a mask is a weight of 0
or 1. No weight changes what the loss is divided by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from msgspec import UNSET
from torch import Tensor

from artd_schema.run.spec import CorrectionSpec, LossSpec

from .loss_api import LossInputs, Mean
from .losses import exp_bounded

Weighted = tuple[Tensor | None, Mapping[str, Mean]]
"""(weight of each token [n], None where all are 1; metrics)."""


def decouple(inputs: LossInputs, spec: LossSpec, proximal: Tensor | None = None) -> LossInputs:
    """Return what the loss is given: with `proximal` trainer, the trainer's logprobs before the job in place of the engine's (decoupled PPO,
    arXiv:2110.00641, eq. 3). proximal: these logprobs [n]; None: the weights are still those, so they are `logprobs` without gradient."""
    if spec.proximal != "trainer":
        return inputs
    return (
        replace(inputs, old_logprobs=inputs.logprobs.detach())
        if proximal is None
        else replace(inputs, old_logprobs=proximal)
    )


def weigh(inputs: LossInputs, spec: LossSpec, proximal: Tensor | None = None) -> Weighted:
    """Return the product of all weights that the spec asks for. proximal: as for `decouple`; k is then of these logprobs, whatever the
    present ones are. Collective: every rank that shares the row calls it."""
    asked = spec.correction or CorrectionSpec()
    difference = (inputs.logprobs.detach() if proximal is None else proximal) - inputs.old_logprobs
    factors = [*_weights(difference, spec, asked), *_masks(inputs, difference, asked)]
    if not factors:
        return None, {}
    weight = torch.stack(factors).prod(0)
    return weight, {"correction_mean": Mean.of(weight), "correction_masked_fraction": Mean.of(weight == 0)}


def _weights(difference: Tensor, spec: LossSpec, asked: CorrectionSpec) -> Iterator[Tensor]:
    """Yield k where the loss has no k of its own, at most `tis` (truncated importance sampling: E. Ionides 2008, doi:10.1198/106186008X320456;
    for engine and trainer F. Yao et al. 2025, https://fengyao.notion.site/off-policy-rl)."""
    if spec.proximal == "trainer" or asked.tis is not UNSET:
        k = exp_bounded(difference)
        yield k if asked.tis is UNSET else k.clamp(max=asked.tis)


def _masks(inputs: LossInputs, difference: Tensor, asked: CorrectionSpec) -> Iterator[Tensor]:
    """Yield 1 where a ratio lies within the bounds asked for: the token's k (IcePop, arXiv:2510.18855), the product of its sequence's, or
    their geometric mean (J. Liu et al. 2025, "When Speed Kills Stability": sequence masks)."""
    if asked.icepop is not UNSET:
        yield within(exp_bounded(difference), asked.icepop)
    if asked.product is not UNSET or asked.geometric is not UNSET:
        total = inputs.sequence_sum(difference)
        count = inputs.sequence_sum(torch.ones_like(difference))
        if asked.product is not UNSET:
            yield within(exp_bounded(total), asked.product)
        if asked.geometric is not UNSET:
            yield within(exp_bounded(total / count), asked.geometric)


def within(ratios: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return 1 where low <= ratio <= high, else 0 [n]."""
    low, high = bounds
    return ((ratios >= low) & (ratios <= high)).to(ratios.dtype)
