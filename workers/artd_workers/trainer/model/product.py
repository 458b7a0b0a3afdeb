"""Computes a frozen linear and its adapter as one product, with its own backward.

A GPU's linears use it once an adapter is attached. It is plain torch and works on any device. The gradients reach the adapter's
fp32 masters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .lora import FusedAdapter


class AdaptedProduct(torch.autograd.Function):
    """x @ weight.t(), to which an adapter's product is added in place; gradients are added in the same way, so nothing is
    written twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, adapter: FusedAdapter, *_masters: Tensor) -> Tensor:
        """Return the product of x [..., in] and weight [out, in]. The last arguments are the adapter's A, then its B, which get
        gradients."""
        a, b = adapter.join(x.dtype)
        flat = x.flatten(0, -2)
        low = flat @ a.t()
        ctx.save_for_backward(x, weight, low)
        ctx.adapter = adapter
        return (flat @ weight.t()).addmm_(low, b.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, low = ctx.saved_tensors
        a, b = ctx.adapter.join(x.dtype)
        slope, flat = grads[0].flatten(0, -2), x.flatten(0, -2)
        d_low = slope @ b
        masters = ctx.adapter.gradients(d_low.t() @ flat, slope.t() @ low)
        d_x = (slope @ weight).addmm_(d_low, a).view_as(x) if ctx.needs_input_grad[0] else None
        d_weight = slope.t() @ flat if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None, *masters


def adapted_product(x: Tensor, weight: Tensor, adapter: FusedAdapter) -> Tensor:
    """Return the product of a linear [out, in] and its adapter with x [..., in]."""
    return AdaptedProduct.apply(x, weight, adapter, *adapter.a, *adapter.b)
