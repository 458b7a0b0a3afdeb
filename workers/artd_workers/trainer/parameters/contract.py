"""Defines what an optimizer needs of the parameters that a run trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn


class ParameterSet(Protocol):
    """Parameters that an optimizer works on, with their names and layout on disk.

    `views`: whether `outward` returns views of its argument, not copies.
    """

    views: bool

    def list_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (own name, parameter), in the order in which gradients are summed."""
        ...

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors of the parameters' shapes, by own name, to names and layout on disk."""
        ...

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `outward`. Raises ValueError when the names are not exactly those on disk."""
        ...

    def refresh_weights(self) -> None:
        """Recompute what is derived from the parameters, after the optimizer changed them."""
        ...

    def gradient_norm(self) -> float:
        """Return the global 2-norm of the gradients. Where each rank has a part of their sum, sum them first."""
        ...
