"""What an optimizer asks of the parameters that a run trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn


class ParameterSet(Protocol):
    """Parameters that an optimizer works on, and their names and layout on disk. views: `outward` gives parts of what it is
    given, and no copies."""

    views: bool

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(own name, parameter), in the order in which gradients are added up."""
        ...

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the parameters' shapes by own name -> by name and layout on disk."""
        ...

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `outward`. Raises ValueError when the names are not exactly those on disk."""
        ...

    def changed(self) -> None:
        """The optimizer has changed the parameters: make anew what is made of them."""
        ...

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradients; adds them up first when each rank has a part of their sum."""
        ...
