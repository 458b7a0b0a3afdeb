"""Policy losses, one function each: `LOSSES`.

Signs: a loss is minimised. Behaviour logprobs are the engine's, at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .loss_api import LossInputs, LossOutput, Mean

_MAX_LOG_RATIO = 20.0
"""exp of a larger difference would overflow or be meaningless; the weight is clipped far below it anyway."""


def ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return the importance ratio pi_new / pi_old per token [n], without gradient."""
    return (logprobs.detach() - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def cispo(inputs: LossInputs, *, clip_high: float) -> LossOutput:
    """Compute CISPO per token (arXiv:2506.13585, eq. 4): -sg(clip(ratio, 0, clip_high)) * advantage * logprob."""
    weight = ratio(inputs.logprobs, inputs.old_logprobs).clamp(0.0, clip_high)
    clipped = ratio(inputs.logprobs.double(), inputs.old_logprobs.double()) > clip_high
    return LossOutput(-weight * inputs.advantages * inputs.logprobs, {"clipped_fraction": Mean.of(clipped)})


LOSSES: dict[str, Callable[..., LossOutput]] = {"cispo": cispo}
"""Loss by `loss.kind`. The daemon knows these names from `artd_schema.losses`; `objective.adopt` adds a package's."""
