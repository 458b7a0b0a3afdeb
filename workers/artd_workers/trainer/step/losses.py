"""Policy losses, one function each: `LOSSES`. docs/losses.md has the same formulas, and the reasons for the defaults.

A loss is minimised. r[t] is the importance ratio of token t: the trainer's probability divided by that of
`old_logprobs`. A[t] is its advantage.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .loss_api import LossInputs, LossOutput, Mean

_MAX_LOG_RATIO = 20.0
"""exp of a larger difference would overflow or be meaningless; the weight is clipped far below it anyway."""


def ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return the importance ratio pi_new / pi_old per token [n], without gradient."""
    return exp_bounded(logprobs.detach() - old)


def exp_bounded(log_ratios: Tensor) -> Tensor:
    """Return exp of the log ratios [n], clamped to -20 .. 20. A clamped ratio has no gradient."""
    return log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def cispo(inputs: LossInputs, *, clip_high: float) -> LossOutput:
    """Compute CISPO per token (arXiv:2506.13585, eq. 4): -sg(clip(ratio, 0, clip_high)) * advantage * logprob."""
    weight = ratio(inputs.logprobs, inputs.old_logprobs).clamp(0.0, clip_high)
    clipped = ratio(inputs.logprobs.double(), inputs.old_logprobs.double()) > clip_high
    return LossOutput(-weight * inputs.advantages * inputs.logprobs, {"clipped_fraction": Mean.of(clipped)})


def reinforce(inputs: LossInputs) -> LossOutput:
    """Compute REINFORCE per token (Williams 1992, doi:10.1007/BF00992696): -advantage * logprob. There is no off-policy
    correction."""
    return LossOutput(-inputs.advantages * inputs.logprobs)


def sft(inputs: LossInputs) -> LossOutput:
    """Compute cross-entropy per token: -logprob. The tokens are those of examples; artd multiplies by their weights, as
    for every loss."""
    return LossOutput(-inputs.logprobs)


def importance_sampling(inputs: LossInputs) -> LossOutput:
    """Compute -r * advantage per token, with the gradient -r * advantage * grad logprob (Degris et al.,
    arXiv:1205.4839, eq. 5). It is unbiased for one token, and r has no bound."""
    return LossOutput(-_ratios(inputs) * inputs.advantages)


def ppo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float = 3.0) -> LossOutput:
    """Compute PPO's clipped surrogate per token (arXiv:1707.06347, eq. 7) with two bounds (DAPO, arXiv:2503.14476, eq. 10), and for negative
    advantages a third (dual clip, arXiv:1912.09729, eq. 5): -max(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), dual_clip A)."""
    ratios = _ratios(inputs)
    surrogate = _surrogate(ratios, inputs.advantages, clip_low, clip_high)
    floor = dual_clip * inputs.advantages
    bounded = (inputs.advantages < 0) & (surrogate < floor)
    metrics = _clip_metrics(ratios, inputs.advantages, clip_low, clip_high)
    return LossOutput(-surrogate.where(~bounded, floor), metrics | {"dual_clipped_fraction": Mean.of(bounded)})


def grpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Compute GRPO's surrogate per token (arXiv:2402.03300, eq. 3): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    The run's `normalise` averages over each trajectory first, and `kl` adds GRPO's penalty."""
    ratios = _ratios(inputs)
    surrogate = _surrogate(ratios, inputs.advantages, clip_low, clip_high)
    return LossOutput(-surrogate, _clip_metrics(ratios, inputs.advantages, clip_low, clip_high))


def dr_grpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Compute Dr. GRPO per token (arXiv:2503.20783, section 3.2): GRPO's surrogate. The defaults in `Own` make the
    difference: advantages are not divided by a standard deviation, and sums are not divided by an answer's length."""
    return grpo(inputs, clip_low=clip_low, clip_high=clip_high)


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Compute GSPO (arXiv:2507.18071, eq. 5 and 7): GRPO's surrogate with one ratio for all tokens of a sequence, the
    geometric mean of their ratios."""
    count = inputs.sequence_sum(inputs.logprobs.new_ones(len(inputs.logprobs)))
    ratios = exp_bounded(inputs.sequence_sum(inputs.logprobs - inputs.old_logprobs) / count)
    surrogate = _surrogate(ratios, inputs.advantages, clip_low, clip_high)
    return LossOutput(-surrogate, _clip_metrics(ratios, inputs.advantages, clip_low, clip_high))


def _ratios(inputs: LossInputs) -> Tensor:
    """Return r [n], with gradient."""
    return exp_bounded(inputs.logprobs - inputs.old_logprobs)


def _surrogate(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return the smaller of r A and clip(r, 1 - low, 1 + high) A [n]."""
    return (ratios * advantages).minimum(ratios.clamp(1 - low, 1 + high) * advantages)


def _clip_metrics(ratios: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Mean]:
    """Measure the share of tokens that have no gradient because a bound clips their ratio."""
    below, above = (ratios < 1 - low) & (advantages < 0), (ratios > 1 + high) & (advantages > 0)
    return {
        "clipped_fraction": Mean.of(below | above),
        "clipped_low_fraction": Mean.of(below),
        "clipped_high_fraction": Mean.of(above),
    }


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "cispo": cispo,
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "importance_sampling": importance_sampling,
    "reinforce": reinforce,
    "sft": sft,
}
"""Loss by `loss.kind`. The daemon knows these names from `artd_schema.run.losses`; `objective.adopt` adds a package's."""
