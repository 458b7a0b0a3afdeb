"""What coarse arithmetic alone makes of a model's answers: the same forward, rounded otherwise.

Owner of: no state. Invariants: nothing of the model is changed; the same seed draws the same on every rank, so that ranks which
hold copies of an activation still do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
"""bfloat16: the largest relative error of one rounding. float32: twice that, as a nudge is itself rounded to float32."""
_SEED = 1_729


@contextmanager
def otherwise(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Within the block what every attention, every MLP and every layer gives is off by up to one rounding of `dtype`,
    drawn evenly, as if another kernel had summed in another order."""
    generators: dict[torch.device, torch.Generator] = {}

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(_SEED)
        drawn = torch.rand(tensor.shape, generator=generators[tensor.device], device=tensor.device)
        return (tensor.double() * (1 + ULP[dtype] * (2 * drawn.double() - 1))).to(tensor.dtype)

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (moved(output[0]), *output[1:]) if isinstance(output, tuple) else moved(output)

    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    hooks = [part.register_forward_hook(hook) for one in layers for part in (one.self_attention, one.mlp, one)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
