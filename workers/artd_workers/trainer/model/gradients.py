"""Computes the norm of gradients, in fp64 and in parameter order, so the same gradients give the same number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the global 2-norm: each tensor's sum of squares in fp64, added in parameter order."""
    found = squares(parameters)
    # One read for all, because on a GPU each read waits for the device.
    return math.sqrt(sum(torch.stack(found).tolist())) if found else 0.0


def squares(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the sum of squares of each gradient that exists, fp64 []."""
    return [_square(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _square(grad: Tensor) -> Tensor:
    if grad.is_cuda:  # one pass, which adds in another order
        return torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    return grad.double().square().sum()
