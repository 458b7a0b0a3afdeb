"""Values made of parameters, kept until one of these changes.

Purpose: an adapter's matrices in the model's dtype, joined as its products take them, are made once a step instead of in every
layer call. Owner of: the last value. Invariants: any write to a parameter that torch counts (a load, `Optimizer.step`) makes a new
value; the value has no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Value = tuple[Tensor, Tensor]


class Cached:
    """make: gives the value for a dtype from the parameters as they are."""

    def __init__(self, make: Callable[[torch.dtype], Value]) -> None:
        self._make = make
        self._key: tuple[Any, ...] | None = None
        self._value: Value | None = None

    def of(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> Value:
        """The value of these parameters as they are now."""
        key = (dtype, *((one.data_ptr(), one._version) for one in parameters))
        if self._value is None or key != self._key:
            with torch.no_grad():
                self._key, self._value = key, self._make(dtype)
        return self._value
