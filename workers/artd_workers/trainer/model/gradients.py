"""The norm of gradients.

Owner of: no state. Invariants: fp64, in parameter order: the same gradients give the same number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Global 2-norm, each tensor's sum of squares in fp64, added up in parameter order."""
    found = squares(parameters)
    # Read at once: on a GPU each would wait for the device.
    return math.sqrt(sum(torch.stack(found).tolist())) if found else 0.0


def squares(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Sum of squares of each gradient that is there, fp64 []."""
    return [_square(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _square(grad: Tensor) -> Tensor:
    if grad.is_cuda:  # in one pass, which adds up in another order
        return torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    return grad.double().square().sum()
