"""Measures what coarse arithmetic alone does to a model's answers: the same forward with other roundings.

The model stays unchanged. The same seed draws the same numbers on every rank, so ranks that hold copies of an activation still
do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
"""bfloat16: the largest relative error of one rounding. float32: twice that, because the changed value is itself rounded to float32."""
_SEED = 1_729


@contextmanager
def perturb_rounding(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Inside the block, change the output of every attention, MLP and layer by up to one rounding of `dtype`.

    The changes are drawn evenly, as if another kernel had summed in another order.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def nudge(tensor: Tensor) -> Tensor:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(_SEED)
        drawn = torch.rand(tensor.shape, generator=generators[tensor.device], device=tensor.device)
        return (tensor.double() * (1 + ULP[dtype] * (2 * drawn.double() - 1))).to(tensor.dtype)

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (nudge(output[0]), *output[1:]) if isinstance(output, tuple) else nudge(output)

    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    hooks = [part.register_forward_hook(hook) for one in layers for part in (one.self_attention, one.mlp, one)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
