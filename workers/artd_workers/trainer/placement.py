"""Where a model lives and in what numbers it computes: all that differs between the CPU and a GPU, by name.

Purpose: `Placement` chooses the device, the dtype of base weights and activations, whether the experts of a layer are one
parameter (grouped products) or many, and what is recomputed; `model.build` takes one. Owner of: no state.
Invariants: trained parameters of an adapter and the optimizer's moments are fp32 everywhere; nothing here imports
Transformer Engine, which exists only where there is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Placement:
    """device: `cpu` or `cuda`; dtype: of base weights and activations; grouped: a layer's experts are one parameter;
    recompute: how many layers, from the first, keep only their input and run again in the backward."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    grouped: bool = False
    recompute: int = 0

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def settings(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
        numbers = {
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
            "use_cpu_initialization": not self.cuda,
        }
        if self.recompute == 0:
            return numbers
        again = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": self.recompute}
        return numbers | again


CPU = Placement()
"""float32, one expert after the other: a batch gives the same bits again."""
CUDA = Placement("cuda", torch.bfloat16, grouped=True)
"""bf16 by Transformer Engine, FlexAttention and grouped products."""
