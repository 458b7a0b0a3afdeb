"""Linears that tensor-parallel ranks split, with their adapters.

Each rank has a part of the weight and a part of the row's tokens. Tokens are gathered before the product, or its sums are
scattered after it, once for weight and adapter. It works on any device. Gradients of an adapter's copied matrix are each rank's
part of a sum.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from .lora import FusedAdapter
from .product import adapted_product


class SplitColumn(ColumnParallelLinear):
    """Each rank has a part of the output: x [s / tp, b, in] -> [s, b, out / tp]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: FusedAdapter | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.adapter is None:
            return super().forward(input_, *args, **kwargs)
        return adapted_product(gather_from_sequence_parallel_region(input_), self.weight, self.adapter), None


class SplitRow(RowParallelLinear):
    """Each rank has a part of the input: x [s, b, in / tp] -> [s / tp, b, out]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: FusedAdapter | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.adapter is None:
            return super().forward(input_, *args, **kwargs)
        return reduce_scatter_to_sequence_parallel_region(adapted_product(input_, self.weight, self.adapter)), None


def gather_hidden(hidden: Tensor, rows: Tensor) -> Tensor:
    """Gather the hidden states [n, h] at `rows` of a row whose tokens the ranks share, [s / tp, 1, h]. Collective."""
    return gather_from_sequence_parallel_region(hidden)[rows, 0]


def gather_logits(logits: Tensor) -> Tensor:
    """Gather the logits [n, vocab] from each rank's [n, vocab / tp]; use it for few tokens. Collective."""
    return gather_from_tensor_model_parallel_region(logits)
