"""Caches values that are computed from parameters, until a parameter changes.

So an adapter's matrices, joined and in the model's dtype, are made once a step and not in every layer call. Any write to a
parameter that torch counts (a load, `Optimizer.step`) makes a new value. The value has no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Value = tuple[Tensor, Tensor]


class Cached:
    """Holds one value. `make(dtype)` computes it from the present parameters."""

    def __init__(self, make: Callable[[torch.dtype], Value]) -> None:
        self._make = make
        self._key: tuple[Any, ...] | None = None
        self._value: Value | None = None

    def of(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> Value:
        """Return the value for the present parameters, computed if they changed."""
        key = (dtype, *((one.data_ptr(), one._version) for one in parameters))
        if self._value is None or key != self._key:
            with torch.no_grad():
                self._key, self._value = key, self._make(dtype)
        return self._value
